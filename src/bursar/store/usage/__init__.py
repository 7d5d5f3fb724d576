"""Hours of use in buckets, records of finished work, reports, and budgets that others keep.

Read `usage_levels.py` first.
"""
