"""Handlers of nodes beside the common ones: joining, certificates, claims, drains, fences, evictions, utilisation.

Read `routes.py` first.
"""
