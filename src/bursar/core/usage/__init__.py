"""Usage over time: GPU-hours and node-hours from step functions, budgets and their penalty, usage reports.

Read `usage_levels.py` first.
"""
