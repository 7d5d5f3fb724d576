"""Commands on requests: decisions at approval gates, growth and shrinkage of approved claims, ends of approvals.

Read `decide.py` first.
"""
