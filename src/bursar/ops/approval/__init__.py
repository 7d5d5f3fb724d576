"""Verbs on requests: decide them, and do what is due for approvals."""
