"""Caches of the tenant tree and of the cluster's largest nodes."""
