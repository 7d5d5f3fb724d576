"""The leader's row, queries to the leader, and counts of queues. Read `leader.py` first."""
