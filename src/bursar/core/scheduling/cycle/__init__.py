"""One scheduling cycle: order the queue, place units, reserve capacity, pick victims, and diagnose what stays pending.

Read `cycle.py` first; then `fair_queue.py` (order), `placer.py` (placement), `backfill.py` (EASY reservations) and
`preemption.py` (victims).
"""
