"""Business rules as pure functions and values, without I/O, clock, randomness or logging.

Areas, from the lowest up: values, objects, credit, nodes, quota, usage, scheduling, batch. Every decision on quota,
fair share, placement, preemption and credit is made by these rules. Read `quota/quota.py` (quota arithmetic) and
`scheduling/cycle/cycle.py` (one scheduling cycle) first.
"""
