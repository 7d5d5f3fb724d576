"""The runtime of one process: its lanes, transactions, idempotency keys, change feed and metrics.

Read `lane.py` (the batcher) and `transaction.py` (exactly once) first. Every verb takes the `Runtime` of `runtime.py`.
"""
