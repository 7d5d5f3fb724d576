"""Nodes: capacity and devices, sensitive claims, liveness, eviction, and the check that every bind makes under locks.

Read `node.py` first, then `bind_check.py`.
"""
