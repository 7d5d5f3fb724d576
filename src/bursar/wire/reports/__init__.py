"""Bodies and answers that are no objects: credit, statements, usage, CloudEvents.

Read `credit.py` first.
"""
