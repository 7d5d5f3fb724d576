"""Commands on credit and usage: balances, top-ups, prices, leases, the ledger, usage reports.

Read `credit.py` first.
"""
