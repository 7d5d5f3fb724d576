"""`bursar bench`: benchmarks against a baseline that is measured in the same run.

Read `main.py` first, then `api.py`.
"""
