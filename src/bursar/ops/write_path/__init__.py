"""The write path: claim, lock, read, decide, save, once per batch; and the same for changes of the tenant tree.

Read `batch.py` first. docs/invariants.md states the order of locks.
"""
