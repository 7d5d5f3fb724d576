"""Converts documents to scheduler values: requests, constraints, nodes, shares and priority classes."""
