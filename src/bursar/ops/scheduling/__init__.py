"""Verbs of the scheduler: committing plans, leader election, questions to the leader, cost estimates.

Read `bind.py` first. Its commands are in `commands/scheduling/`.
"""
