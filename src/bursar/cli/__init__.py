"""The command line: click commands that speak only through the SDK, each loaded when it is called.

Read `main.py` first: it lists them all. `shell` has what commands share.
"""
