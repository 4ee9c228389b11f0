"""Workers implement exactly the scorers that the table of the library marks as available."""

from __future__ import annotations

import inspect

import pytest

from foreshock.scorers import ENGINES, available_scorers
from foreshock.scorers import SCORERS as TABLE
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.table import SCORERS, installed_scorers, scorer_named


def test_workers_implement_exactly_the_available_scorers() -> None:
    assert tuple(SCORERS) == available_scorers()
    for name in set(TABLE) - set(SCORERS):
        with pytest.raises(UnsupportedScoreError):
            scorer_named(name)


@pytest.mark.parametrize("name", SCORERS)
def test_every_available_scorer_has_a_function_of_three_arguments(name: str) -> None:
    function = SCORERS[name].load()
    assert len(inspect.signature(function).parameters) == 3
    # A function of another file would leave that file's scorer without its own.
    assert function.__module__ == SCORERS[name].function.partition(":")[0]


@pytest.mark.parametrize("name", SCORERS)
def test_engine_is_the_part_of_the_name_before_the_dot_or_a_server(name: str) -> None:
    engine = ENGINES[SCORERS[name].engine]
    assert engine.remote or engine.name == name.partition(".")[0]


def test_scorer_of_a_server_is_offered_if_its_server_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_ENGINE_SERVERS", raising=False)
    assert "FORESHOCK_ENGINE_SERVERS='vllm=http://host:port'" in str(scorer_named("vllm.http").lacks())
    assert "vllm.http" not in installed_scorers()
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVERS", "vllm=http://127.0.0.1:8000")
    assert "vllm.http" in installed_scorers()
    assert "sglang.http" not in installed_scorers()


def test_scorers_of_installed_engines_are_offered() -> None:
    assert {"torch.trainer", "torch.bfloat16", "torch.float32"} <= set(installed_scorers())


def test_error_for_unknown_scorer_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedScoreError, match=r"torch\.trainer"):
        scorer_named("torch.float64")
