"""Carrying instructions out: placements, their folders, the journal, wipes, metering.

Read `executor.py` first.
"""
