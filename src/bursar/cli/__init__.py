"""The command line: click commands that speak only through the SDK, each loaded when it is called.

`shell` has what commands share; `main.py` lists them all.
"""
