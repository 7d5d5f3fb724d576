"""Types of the API and of the agent protocol: msgspec structs, read strictly and shown as stored; protobuf messages.

`shared` has the parts of all kinds, `kinds` one file per kind, `reports` bodies and answers that are no objects,
`to_scheduler` converts documents to scheduler values, `scheduler` has the gRPC stubs. Read `shared/kind.py` and
`kinds/queue.py`, the smallest kind, first.
"""
