"""Rolling usage up into hours, and budget alerts."""
