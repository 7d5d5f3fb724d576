"""API objects as values: identity, resource requests, phases, charges, finalizers, jobs and pending reasons.

Read `object.py` (the stored form), then `allocation.py` and `ask.py` (requests and constraints of work).
"""
