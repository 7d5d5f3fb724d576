"""The shim: one small supervisor process per command, which outlives the agent. It imports little, to start fast.

Read `shim.py` first.
"""
