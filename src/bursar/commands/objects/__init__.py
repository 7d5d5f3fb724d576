"""Commands on objects of any kind: create, change, delete, removal after finalizers, namespaces.

`status.py` edits statuses and their conditions. Read `object.py` first.
"""
