"""Commands on tenants and their limits."""
