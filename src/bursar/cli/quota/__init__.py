"""Commands on tenants and their limits. Read `tenant.py` first."""
