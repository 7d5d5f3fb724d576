"""Objects as the rules see them: identity, requests, phases, charges, finalizers, and why an allocation is pending.

Read `object.py` (what the store keeps), then `allocation.py` and `ask.py` (what work asks for).
"""
