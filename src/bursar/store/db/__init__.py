"""Connections, transactions, migrations, the SQL loader, and idempotency keys.

Read `database.py` first: it is the one place that knows which errors of PostgreSQL are worth a retry.
"""
