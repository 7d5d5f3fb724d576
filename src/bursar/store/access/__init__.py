"""Bearer tokens, stored as hashes."""
