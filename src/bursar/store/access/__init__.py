"""Bearer tokens, stored as hashes, members of tenants, and registered identities.

Read `token.py` first.
"""
