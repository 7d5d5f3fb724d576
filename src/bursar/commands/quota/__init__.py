"""Rules of changes of the tenant tree: the tree after the change, checks that refuse it, and recounted quota counters.

Read `tenant_tree.py` first.
"""
