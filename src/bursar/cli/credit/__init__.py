"""Commands on credit and usage."""
