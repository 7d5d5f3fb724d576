"""The agent's decisions as a pure state machine: events in, instructions out.

Read `state.py` first.
"""
