"""What the agent does, as a pure state machine: events in, instructions out.

Read `state.py` first.
"""
