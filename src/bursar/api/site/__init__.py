"""The route table, and what is made from it: discovery, OpenAPI, the documentation page, health and metrics.

Read `routes.py` first.
"""
