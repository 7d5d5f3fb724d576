"""Bearer tokens, stored as hashes, and members of tenants.

Read `token.py` first.
"""
