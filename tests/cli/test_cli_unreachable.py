"""Commands whose server cannot be reached: what is wrong is the connection, and that is what they say."""

import pytest
from click.testing import CliRunner

from bursar.cli.main import cli
from bursar.cli.shell.problem import UNAVAILABLE
from support.process.server import free_port


@pytest.mark.parametrize(
    "line", ["node token --name gpu-01", "run -- true", "logs train", "get nodes", "whoami", "status"]
)
def test_the_connection_is_said_to_be_at_fault_and_not_the_token(line: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    environment = {"BURSAR_URL": url, "BURSAR_TOKEN": "bsr_a_b", "BURSAR_CONFIG": "/nonexistent/config.yaml"}
    result = CliRunner(env=environment).invoke(cli, line.split())
    assert result.exit_code == UNAVAILABLE, result.output
    told, hint = result.stderr.splitlines()
    assert told == f"Error: could not reach {url}: the connection was refused"
    assert "nothing listens there" in hint
    assert "BURSAR_URL" in hint
    assert "login" not in hint
    assert "token" not in hint.lower()


def test_who_logs_in_is_told_of_the_server_just_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    environment = {"BURSAR_CONFIG": "/nonexistent/config.yaml"}
    result = CliRunner(env=environment).invoke(cli, ["login", url, "--token", "bsr_a_b"])
    assert result.exit_code == UNAVAILABLE
    assert f"Error: could not reach {url}: the connection was refused" in result.stderr
    assert "BURSAR_URL" not in result.stderr
