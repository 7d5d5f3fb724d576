"""Speaking to the control plane: the heartbeat stream, certificates, the agent's own server.

Read `stream.py` first.
"""
