"""Verbs on credit: top-ups, leases, prices, reconciliation, sealing and verifying the ledger, statements.

Read `ledger.py` first.
"""
