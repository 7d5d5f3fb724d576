"""Verbs on allocations and jobs: reports of nodes, the job controller, changes of pending work, dry runs.

Read `allocation.py` and `job_controller.py` first.
"""
