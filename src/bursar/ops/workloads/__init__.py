"""Verbs on allocations and jobs: creating jobs, the job controller, dry runs, effective priorities.

Read `job_controller.py` first. Their commands are in `commands/workloads/`.
"""
