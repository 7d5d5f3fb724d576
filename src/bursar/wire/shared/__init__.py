"""What every kind uses: metadata, the `Kind` itself, strict reading of JSON, YAML and protobuf, and all faults of a
body.

Read `kind.py` first.
"""
