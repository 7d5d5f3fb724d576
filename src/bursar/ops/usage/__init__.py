"""Rolling usage up into hours, and budget alerts. Read `usage_rollup.py` first."""
