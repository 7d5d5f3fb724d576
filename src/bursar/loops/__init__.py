"""Loops of the controller: scheduling, jobs, leases, node liveness, drains, reconciliation, housekeeping.

Read `schedule.py` and `informer.py` first.
"""
