"""Commands of the scheduler: binding units of work to nodes, eviction, preemption, notes on pending work.

Read `bind.py` first.
"""
