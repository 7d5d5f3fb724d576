"""Bursar: a control plane that decides who gets which GPUs, when, and who pays.

Read `main.py` (the entry point) first, then `serve.py`. ARCHITECTURE.md has the packages.
"""

__version__ = "0.1.0"
