"""Verbs: read, submit commands, retry; and the write path that locks, reads, decides and saves.

`runtime` holds lanes, transactions and the feed; the other areas have the verbs. Read `runtime/transaction.py`, then
`write_path/batch.py`: every write goes this way.
"""
