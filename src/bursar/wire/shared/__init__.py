"""Shared parts of kinds: metadata, the `Kind` itself, strict reading of JSON, YAML and protobuf, all faults of a body.

Read `kind.py` first.
"""
