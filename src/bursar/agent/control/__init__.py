"""The agent's gRPC: the heartbeat stream, the node's certificates, and the agent's own server.

Read `stream.py` first.
"""
