"""Handlers for objects of any kind: get, list, watch, create, edit, delete, events, tables, webhooks.

Read `object.py` first.
"""
