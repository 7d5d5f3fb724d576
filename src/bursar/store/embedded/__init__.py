"""An embedded PostgreSQL: Bursar supervises its own server when it is given no database URL.

    embedded = await start(Path("/var/lib/bursar"))
    pool = await asyncpg.create_pool(embedded.url)
    ...
    await embedded.stop()

In the data directory:

    lock            held by the supervising process, with its pid inside; the kernel frees it, also after kill -9
    postgres/       the cluster (PGDATA)
    postgres.new/   a cluster whose initdb is under way or was cut short; always safe to delete
    postgres.lock   held by every PostgreSQL process of this directory, so "free" means that none is left
    postgres.log    the server's log; the previous one is postgres.log.1
    run/            the socket, when its path is short enough for one; else `socket-dir` says where it is

Read `supervisor.py` first (start, restart, stop); then `directory.py` (paths and locks), `account.py` (which user runs
the server), `binaries.py` (which PostgreSQL), `process.py` (how a child is started and how orphans are ended).
"""

from bursar.store.embedded.binaries import Binaries, find_binaries
from bursar.store.embedded.error import EmbeddedError
from bursar.store.embedded.supervisor import Embedded, start

__all__ = ["Binaries", "Embedded", "EmbeddedError", "find_binaries", "start"]
