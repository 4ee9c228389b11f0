"""Workers implement exactly the scorers that the table of the library marks as available."""

from __future__ import annotations

import inspect

import pytest

from foreshock.scorers import ENGINES, SCORERS, available_scorers
from foreshock_probes.offers import engine_of, installed_scorers, load_scorer, what_lacks
from foreshock_probes.scorers.request import UnsupportedScoreError


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
