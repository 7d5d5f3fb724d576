"""What is spoken: msgspec types of the API, read strictly and shown as stored; the protobuf messages of agents.

`shared` has what all kinds use, `kinds` one file per kind, `reports` what is no object, `to_scheduler` the way from
documents to the scheduler's values. Read `shared/kind.py` and `kinds/queue.py`, the smallest kind, first.
"""
