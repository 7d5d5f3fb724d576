"""Verbs on objects of any kind: drafts, reading, changing with retries; webhooks.

Read `object.py` first. Their commands are in `commands/objects/`.
"""
