"""The REST API: one route table, handlers by area, one table from refusal to HTTP status.

`http` has the server (connections, bodies, authentication, rate limits), `site` the route table, discovery and OpenAPI.
Read `site/routes.py` first, then `objects/object.py`.
"""
