"""Verbs on nodes: heartbeats, capacity, claims, drains, fences, liveness, the node CA and signed leases.

Read `heartbeat.py` first. Their commands are in `commands/nodes/`.
"""
