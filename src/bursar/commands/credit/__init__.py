"""Commands on credit: top-ups, refunds, leases by name, accounts, prices; renewing claims, ending unpaid work.

Commands of the ledger decide on a `LedgerBatch` (`ledger.py`), all others on a unit of work. Read `ledger.py` first.
"""
