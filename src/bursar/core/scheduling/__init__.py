"""The scheduler: `state` is its view of the cluster, `cycle` decides, `explain` answers questions about decisions.

Read `cycle/cycle.py` first: one cycle from the queue to the plan.
"""
