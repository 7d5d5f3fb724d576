"""Handlers of tenants beside the common ones: PUT with a flat body, and effective limits with usage."""
