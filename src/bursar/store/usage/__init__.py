"""Usage hours in buckets, records of finished work, usage reports, and external budgets.

Read `usage_levels.py` first.
"""
