"""Prepaid credit: accounts, leases, prices, the double-entry ledger and its hash chain, statements, reconciliation.

Read `lease.py` first, then `ledger.py`, which decides all commands of one batch on the accounts it has locked.
"""
