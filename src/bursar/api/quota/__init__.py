"""Handlers of tenants beside the common ones: PUT with a flat body, effective limits with usage, changes of limits.

Read `quotas.py` first: it shows and watches the figures of every scope; `tenant.py` has what is special about tenants.
"""
