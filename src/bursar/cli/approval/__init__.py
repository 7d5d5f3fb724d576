"""Commands on requests that await approval."""
