"""Handlers of approvals: the list of undecided requests, and decisions at gates.

Read `approval.py` first: it has the routes and the decisions; `open_requests.py` has the list's items and the watch.
"""
