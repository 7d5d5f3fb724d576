"""Verbs that depend on every kind: creating an object with the command of its kind, the first objects.

Read `create.py` first.
"""
