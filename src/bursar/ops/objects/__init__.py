"""Verbs on objects of any kind: create, change, delete, namespaces, webhooks, the objects of a new installation.

Read `object.py` first.
"""
