"""Which server and which token: where they come from, and where a token is never sent."""

import stat
from pathlib import Path

import pytest

from bursar.client import ConfigError
from bursar.client.contexts import DEFAULT_URL, Context, Contexts, config_path, is_loopback, load, resolve, save

PROD = Context("https://prod", "prod-token", "/ca.pem", "ml-team", "prod")
LAB = Context("http://lab:8080", "lab-token", name="lab")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"BURSAR_CONFIG": str(tmp_path / "conf" / "config.yaml")}


def stored(environment: dict[str, str], current: str = "prod") -> dict[str, str]:
    save(config_path(environment), Contexts(current, {"prod": PROD, "lab": LAB}))
    return environment


def test_a_file_is_read_as_it_was_written(environment: dict[str, str]) -> None:
    path = config_path(stored(environment))
    assert load(path) == Contexts("prod", {"prod": PROD, "lab": LAB})


def test_the_file_is_its_owners_alone(environment: dict[str, str]) -> None:
    path = config_path(stored(environment))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    stored(environment)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["config.yaml"]


def test_without_anything_it_is_the_server_on_this_machine(environment: dict[str, str]) -> None:
    assert resolve(environment=environment) == Context(DEFAULT_URL)


def test_the_current_context_is_used(environment: dict[str, str]) -> None:
    assert resolve(environment=stored(environment)) == PROD


def test_a_named_context_wins_over_the_environment(environment: dict[str, str]) -> None:
    surroundings = {**stored(environment), "BURSAR_URL": "http://other", "BURSAR_TOKEN": "other"}
    assert resolve(context="lab", environment=surroundings) == LAB


def test_the_environment_wins_over_the_current_context(environment: dict[str, str]) -> None:
    surroundings = {**stored(environment), "BURSAR_URL": "http://other/", "BURSAR_TOKEN": "other"}
    assert resolve(environment=surroundings) == Context("http://other", "other")


def test_arguments_win_over_everything(environment: dict[str, str]) -> None:
    surroundings = {**stored(environment), "BURSAR_URL": "http://other", "BURSAR_TOKEN": "other"}
    found = resolve(url="http://mine", token="mine", ca_file="/mine.pem", environment=surroundings)
    assert found == Context("http://mine", "mine", "/mine.pem")


def test_a_contexts_token_is_not_sent_elsewhere(environment: dict[str, str]) -> None:
    elsewhere = {**stored(environment), "BURSAR_URL": "http://stranger"}
    assert resolve(environment=elsewhere).token == ""
    same = {**environment, "BURSAR_URL": PROD.url + "/"}
    assert resolve(environment=same).token == PROD.token


def test_a_context_and_another_url_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is for https://prod"):
        resolve(url="http://stranger", context="prod", environment=stored(environment))


def test_an_unknown_context_is_refused_with_the_known_ones(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(context="nowhere", environment=stored(environment))
    assert "lab, prod" in caught.value.hint


@pytest.mark.parametrize("text", ["- a list", "contexts: [1]", "contexts: {a: {}}", "a: b: c", "\x00"])
def test_a_file_that_is_something_else_is_said_to_be_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a configuration file"):
        load(path)


def test_tokens_do_not_show() -> None:
    assert "token" not in repr(PROD)


def test_xdg_is_honoured() -> None:
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/bursar/config.yaml")


def test_loopback() -> None:
    assert all(map(is_loopback, ("http://127.0.0.1:1", "http://[::1]", "http://localhost")))
    assert not any(map(is_loopback, ("http://example.com", "https://10.0.0.1")))
