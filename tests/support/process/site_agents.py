"""waldur-site-agent as it is installed, in a process of its own, one round at a time.

Its own loops do the same every few minutes. A process of its own also because it sets up logging for itself when it is
imported.
"""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

WAIT_SECONDS_MAX = 100.0
DONE = "done"


class SiteAgent:
    """Told which round to do, by which configuration."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder

    def round(self, mode: str, offering: dict[str, Any]) -> None:
        """`order_process`, `report` or `membership_sync`, once, for one offering."""
        path = self._folder / "agent.yaml"
        path.write_text(yaml.safe_dump({"offerings": [offering], "timezone": "UTC", "reporting_periods": 1}))
        assert self._process.stdin is not None
        self._process.stdin.write(f"{mode} {path}\n")
        self._process.stdin.flush()
        self.wait()

    def said(self) -> str:
        """The end of its log."""
        return (self._folder / "log").read_text()[-4000:]

    def wait(self) -> None:
        """Until it is done. One that hangs is ended."""
        assert self._process.stdout is not None
        end = threading.Timer(WAIT_SECONDS_MAX, self._process.kill)
        end.start()
        try:
            for line in self._process.stdout:
                if line.strip() == DONE:
                    return
        finally:
            end.cancel()
        raise AssertionError(f"the agent ended: {self.said()}")


@contextmanager
def running() -> Iterator[SiteAgent]:
    """An agent until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="site-agent-") as name, (Path(name) / "log").open("w") as log:
        command = [sys.executable, __file__, name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        agent = SiteAgent(process, Path(name))
        try:
            agent.wait()
            yield agent
        finally:
            process.kill()
            process.wait(30)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def serve(folder: Path, orders: IO[str]) -> None:
    """In the agent's process: a round for each line."""
    from waldur_site_agent.backend import configure_logger
    from waldur_site_agent.common import healthz, utils
    from waldur_site_agent.polling_processing import agent_membership_sync, agent_order_process, agent_report

    modes = {"order_process": agent_order_process, "report": agent_report, "membership_sync": agent_membership_sync}
    healthz.touch_heartbeat.__defaults__ = (str(folder / "heartbeat"),)
    configure_logger("WARNING")
    told, sys.stdout = sys.stdout, sys.stderr
    print(DONE, file=told, flush=True)
    for line in orders:
        mode, path = line.split()
        configuration = utils.load_configuration(path, mode)
        configuration.waldur_site_agent_mode = mode
        modes[mode]._process_offerings(configuration, {})
        print(DONE, file=told, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.stdin)
