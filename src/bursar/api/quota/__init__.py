"""Handlers of tenants beside the common ones: the flat PUT and effective quotas."""
