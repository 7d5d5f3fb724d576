"""Nodes and placements, heartbeats, liveness, the node CA and the keys that sign leases."""
