"""The unit of work of one write batch: locked rows, the effects so far, and who pays for placements.

Read `unit_of_work.py` first.
"""
