"""Handlers of tokens, and of the caller's identity and permissions. Read `token.py` first."""
