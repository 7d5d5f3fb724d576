"""The route table, and everything generated from it: discovery, OpenAPI, the documentation page, health and metrics.

Read `routes.py` first.
"""
