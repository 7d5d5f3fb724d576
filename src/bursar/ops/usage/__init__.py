"""Rolling usage up into hours."""
