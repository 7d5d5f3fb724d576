"""Commands on nodes and the cluster: cordon, drain, taint, top.

Read `node.py` first.
"""
