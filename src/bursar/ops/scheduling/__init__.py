"""Verbs of the scheduler: bind, evict, leader election, questions to the leader, cost estimates.

Read `bind.py` first.
"""
