"""ColdFront plugin for Bursar: allocations become tenants, namespaces, quotas and members.

Read `wanted.py` first: the state that Bursar should have for an allocation.
"""
