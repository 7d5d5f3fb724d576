"""The kinds of the API, one file each; `registry.py` lists them. Adding a kind is adding a file here.

Read `queue.py`, the smallest, and `allocation.py`, the largest.
"""
