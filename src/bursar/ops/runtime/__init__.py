"""What every verb needs: the runtime with its lanes, transactions, idempotency, the change feed, commands, metrics.

Read `lane.py` (the batcher) and `transaction.py` (exactly once, whatever happens to the connection) first.
"""
