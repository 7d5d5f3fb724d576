"""Verbs: load, decide, save. The package opens transactions and calls rules; API, gRPC and loops call it.

`runtime` holds lanes, transactions and the feed; the other areas have the verbs. Read `runtime/transaction.py`, then
`write_path/batch.py`: every write goes this way.
"""
