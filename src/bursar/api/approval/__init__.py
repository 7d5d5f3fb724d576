"""Handlers of approvals: the list of undecided requests, and decisions at gates."""
