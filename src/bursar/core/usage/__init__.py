"""Usage over time: GPU-hours and node-hours as levels, budgets and their penalty, figures of reports.

Read `usage_levels.py` first.
"""
