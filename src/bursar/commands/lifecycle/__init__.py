"""The registry of commands by kind: change and delete, for kinds that need more than storing the object.

Read `dispatch.py`. `ops/lifecycle/create.py` is its counterpart for creation.
"""
