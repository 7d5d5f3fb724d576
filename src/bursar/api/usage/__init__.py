"""Handlers of usage reports and their export. Read `tenant_usage.py` first."""
