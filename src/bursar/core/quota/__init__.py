"""Quota arithmetic: counters and hard limits in the tenant tree, permits, satisfiability, and texts of quota refusals.

Read `quota.py` first (the arithmetic), then `tenant_tree.py` (which scopes an object charges). `quota_messages.py` has
the texts, and `visibility.py` hides figures that their reader may not see.
"""
