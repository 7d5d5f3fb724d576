"""The rules: pure functions and values, without I/O, clock, randomness or logging.

Every decision of Bursar is made here and reads like the specification: quota, fair share, placement, preemption,
credit. Areas, from the lowest up: values, objects, credit, nodes, quota, usage, scheduling, batch. Read
`quota/quota.py` and `scheduling/cycle/cycle.py` first.
"""
