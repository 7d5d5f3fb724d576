"""HTTP itself: the ASGI application, connections and their limits, bodies, authentication, rate limits, refusals.

Read `app.py` and `route.py` first.
"""
