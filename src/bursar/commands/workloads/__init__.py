"""Commands on allocations and jobs: reports of nodes, release, changes of pending work, job steps, dry runs.

Read `report.py` (how work ends) and `job.py` first.
"""
