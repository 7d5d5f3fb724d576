"""Tokens, and audit lines for what is no object."""
