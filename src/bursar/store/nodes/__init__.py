"""Nodes and placements, heartbeats, liveness, the node CA and the keys that sign leases.

Read `node.py` first, then `heartbeat.py`.
"""
