"""Simulated nodes over the real protocols, gRPC and REST, for demos, tests and benchmarks.

Read `agents.py` (gRPC) or `rest.py` (REST) first.
"""
