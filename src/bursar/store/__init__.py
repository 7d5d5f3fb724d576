"""SQL: the only package that talks to PostgreSQL. Statements are in `sql/<area>/<noun>.sql`, and modules mirror them.

Areas, from the lowest up: db, quota, nodes, access, objects, credit, usage, scheduling; `embedded` runs a PostgreSQL of
our own. Read `db/database.py` first, then `objects/object.py`.
"""
