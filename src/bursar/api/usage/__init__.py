"""Handlers of usage reports and their export."""
