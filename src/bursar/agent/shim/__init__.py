"""The shim: one small process per command, which outlives the agent. It imports little, so that it starts fast.

Read `shim.py` first.
"""
