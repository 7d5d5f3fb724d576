"""Quota counters, the tenant tree's rows and its lock, and the sizes of nodes. Read `quota.py` first."""
