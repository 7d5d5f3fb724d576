"""Handlers of tenants beside the common ones: PUT with a flat body, limits with usage, and changes of limits.

Read `quotas.py` first: it shows and watches the figures of every scope; `limits.py` changes those of a tenant.
"""
