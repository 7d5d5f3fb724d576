"""Handlers of credit: accounts, leases, the ledger, payments, prices, statements, usage events.

Read `credit.py` first: it has the shared parts.
"""
