"""Commands: requests to the write path, decided on a unit of work that was read under locks. No I/O, no database.

A command names the rows to lock and read; its `decide` writes to the unit of work, or returns a refusal. Each area has
its commands and the rules that only they use. Verbs in `ops` submit them to lanes.

Read `command.py` first (the base type), then `objects/object.py`.
"""
