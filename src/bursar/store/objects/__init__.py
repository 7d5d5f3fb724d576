"""Objects and their change feed: locking, reading, saving a batch, listing with selectors, webhooks.

Read `object.py` first, then `batch.py`, which saves a whole batch in one statement.
"""
