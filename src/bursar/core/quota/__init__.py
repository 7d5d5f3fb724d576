"""Quotas: the tenant tree, counters and hard limits, permits, and the messages of refusals.

Read `quota.py` first (the arithmetic), then `tenant_tree.py` (which scopes an object charges).
"""
