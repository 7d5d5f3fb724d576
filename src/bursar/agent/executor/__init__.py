"""The executor: it carries out the state machine's instructions with shims, placement directories and the journal.

Read `executor.py` first.
"""
