"""Parts that kinds share: metadata, the `Kind` itself, strict reading of JSON, YAML and protobuf, and faults of bodies.

Read `kind.py` first.
"""
