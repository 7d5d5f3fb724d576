"""The gRPC services: `NodeAgent` for node agents, `AdminService` for administrators and tenants.

Read `agent.py` (the heartbeat stream) and `hub.py` (directives pushed to agents) first.
"""
