"""Commands on objects of any kind, like kubectl's: get, describe, apply, edit, delete, watch.

Read `get.py` first, then `apply.py`.
"""
