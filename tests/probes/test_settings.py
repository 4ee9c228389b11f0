"""A worker's settings come from FORESHOCK_* variables, are validated, and are logged without secrets."""

import inspect
from pathlib import Path

import pytest

from foreshock.errors import ConfigurationError
from foreshock.scorers import ENGINES, SCORERS, available_scorers
from foreshock_probes.offers import engine_of, installed_scorers, load_scorer, what_lacks
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.settings import load_settings


def test_roots_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_WEIGHTS_ROOTS", "runs=/data/runs, shared@* = /mnt/shared")
    assert load_settings().weights_roots == {"runs": Path("/data/runs"), "shared@*": Path("/mnt/shared")}


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_URL", "http://environment:1")
    assert load_settings(url="http://given:2").url == "http://given:2"
    assert load_settings(url=None).url == "http://environment:1"


def test_api_key_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_API_KEY", "fsk_very_secret")
    settings = load_settings()
    assert settings.api_key is not None
    assert "very_secret" not in str(settings.shown()) + repr(settings)


def test_servers_of_engines_are_parsed_and_their_keys_masked() -> None:
    settings = load_settings(
        engine_servers="vllm=http://127.0.0.1:8000/, sglang=https://host:30000",
        engine_server_keys="vllm=secret",
        engine_servers_reload=" sglang, ",
    )
    assert settings.engine_servers_reload == {"sglang"}
    assert settings.engine_servers == {"vllm": "http://127.0.0.1:8000", "sglang": "https://host:30000"}
    assert settings.shown()["engine_server_keys"] == "vllm=set"
    assert "secret" not in str(settings.shown())


ROOTS = ("runs", "=/data", "runs=", "runs=relative/folder", "a=/x,a=/y", "a@=/x", "@team=/x")
ADDRESSES = ("file:///etc/passwd", "127.0.0.1:8000", "http://user:secret@host", "http://:secret@host", "http://h?q=1")
KEYS = ("vllm=sec\nret", "vllm=secrét", "vllm=sec\x00ret", "a-secret-without-a-name")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("weights_roots", roots) for roots in ROOTS),
        *(("engine_servers", f"vllm={address}") for address in ADDRESSES),
        *(("engine_server_keys", key) for key in KEYS),
    ],
)
def test_invalid_setting_is_refused_by_its_variable_and_without_its_secret(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"FORESHOCK_{name.upper()}") as raised:
        load_settings(**{name: value})
    assert "sec" not in str(raised.value)


def test_password_of_the_services_address_is_not_shown() -> None:
    assert load_settings(url="https://ann:secret@host/path").shown()["url"] == "https://host/path"


def test_workers_implement_exactly_the_available_scorers() -> None:
    for name in {*SCORERS, "torch.float64"} - set(available_scorers()):
        with pytest.raises(UnsupportedScoreError, match=r"torch\.trainer"):
            engine_of(name)


@pytest.mark.parametrize("name", available_scorers())
def test_every_available_scorer_has_an_engine_and_a_function_of_its_own(name: str) -> None:
    function = load_scorer(name)
    assert len(inspect.signature(function).parameters) == 3
    # A function of another file would leave that file's scorer without its own.
    assert function.__module__ == str(SCORERS[name].implementation).partition(":")[0]
    engine = ENGINES[engine_of(name)]
    assert engine.remote or engine.name == name.partition(".")[0]


def test_scorer_of_a_server_is_offered_if_its_server_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_ENGINE_SERVERS", raising=False)
    assert "FORESHOCK_ENGINE_SERVERS='vllm=http://host:port'" in str(what_lacks("vllm.http"))
    assert "vllm.http" not in installed_scorers()
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVERS", "vllm=http://127.0.0.1:8000")
    assert "vllm.http" in installed_scorers()
    assert "sglang.http" not in installed_scorers()


def test_scorers_of_installed_engines_are_offered() -> None:
    assert {"torch.trainer", "torch.bfloat16", "torch.float32"} <= set(installed_scorers())
