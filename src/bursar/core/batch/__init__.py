"""What one write batch decides on: the rows it has locked and read, the effects so far, and who pays for placements.

Read `unit_of_work.py` first.
"""
