"""Verbs that depend on every kind: choosing a kind's command, emptying namespaces, the first objects.

Read `dispatch.py` first.
"""
