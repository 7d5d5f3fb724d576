"""Hours of use in buckets, records of finished work, reports, and external budgets.

Read `usage_levels.py` first.
"""
