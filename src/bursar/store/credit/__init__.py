"""The ledger: accounts, leases, entries, prices, sealed blocks, statements, usage events, reconciliation.

Read `ledger.py` first.
"""
