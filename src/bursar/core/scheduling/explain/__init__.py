"""Answers of the scheduler: why work is pending, what a simulated submission would do, queue positions, wait
statistics.

Read `explain.py` first; `reason_text.py` turns reasons into sentences.
"""
