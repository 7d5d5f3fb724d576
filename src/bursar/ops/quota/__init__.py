"""Caches of the tenant tree and of the cluster's largest nodes. Read `tenant_tree.py` first."""
