"""The gRPC services: one for node agents, one for administrators.

Read `agent.py` (the heartbeat stream) and `hub.py` (directives pushed to agents) first.
"""
