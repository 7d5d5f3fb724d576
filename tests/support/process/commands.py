"""The command `bursar`, as people run it."""

import subprocess

from support.process.server import BURSAR, Server


def bursar(
    server: Server, *words: str, token: str = "", said: str = "", code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with this said to it when it asks; it must leave with this code."""
    environment = {**server.environment, **({"BURSAR_TOKEN": token} if token else {})}
    done = subprocess.run(
        [str(BURSAR), *words], env=environment, input=said, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done
