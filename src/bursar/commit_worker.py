"""The process of the leader's commit worker. Its parent is the leader, and it ends with it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import structlog
import uvloop

from bursar.logs import set_up_logs
from bursar.ops.open_runtime import open_runtime
from bursar.ops.runtime.gc_tuning import calm_collector
from bursar.ops.scheduling.commit_worker import serve
from bursar.store.db.database import AWAY, Database

log = structlog.get_logger()


async def _work(its: socket.socket) -> None:
    database = await Database.open(os.environ["BURSAR_DATABASE_URL"], readers=1)
    runtime = await open_runtime(database)
    calm_collector()
    await serve(runtime, its)


def main() -> None:
    set_up_logs()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_work(socket.socket(fileno=int(sys.argv[1]))))
        except AWAY as error:
            log.warning("commit_worker_start_failed", message="the commit worker cannot start", error=repr(error))
        # The leader is gone. Open transactions are not awaited: the database rolls them back with the connection.
        os._exit(0)


if __name__ == "__main__":
    main()
