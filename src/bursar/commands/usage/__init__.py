"""Commands on usage: budget alerts."""
