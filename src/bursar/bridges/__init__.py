"""Connections to other systems: Waldur, external budgets, webhooks. Each is independent of the others.

Read `webhook.py` (deliveries) or `waldur.py` first.
"""
