"""What a verb on an object of any kind becomes: the command of its kind, emptying namespaces, the first objects.

Read `dispatch.py` first.
"""
