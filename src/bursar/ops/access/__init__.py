"""Verbs on API tokens, and audit lines about tokens and webhooks. Read `token.py` first."""
