"""Handlers of allocations and jobs beside the common ones: explain, simulate, logs, stdin, pods, preemption.

Read `routes.py` first, then `explain.py`.
"""
