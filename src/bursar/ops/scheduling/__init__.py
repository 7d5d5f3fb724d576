"""Verbs of the scheduler: plans, evictions, reports of nodes, leader election, questions to the leader, cost estimates.

Read `placement.py` first. Its commands are in `commands/scheduling/`.
"""
