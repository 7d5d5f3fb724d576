"""Verbs on allocations and jobs: reports of nodes, creating jobs, the job controller, dry runs, effective priorities.

Read `job_controller.py` first. Their commands are in `commands/workloads/`.
"""
