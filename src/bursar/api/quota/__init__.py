"""Handlers of tenants beside the common ones: PUT with a flat body, effective limits with usage, changes of limits."""
