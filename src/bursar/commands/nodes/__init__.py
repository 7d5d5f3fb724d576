"""Commands on nodes: register, change, delete, drain, fence, readiness and lost work, claims and wipes.

Read `node.py` first, then `claim.py`.
"""
