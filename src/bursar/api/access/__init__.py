"""Handlers of tokens, and of who the caller is and what it may do."""
