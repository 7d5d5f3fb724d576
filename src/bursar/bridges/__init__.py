"""Connections to other systems: Waldur, external budgets, webhooks. Each stands alone."""
