"""The table of scorers is what workers offer: every name leads to a function and is one that the service knows."""

from __future__ import annotations

import pytest

from probes.scorers.request import UnsupportedScoreError
from probes.scorers.table import ENGINES, SCORERS, available_scorers, scorer_named


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_has_a_function(name: str) -> None:
    assert callable(SCORERS[name].load())


@pytest.mark.parametrize("name", SCORERS)
def test_the_engine_is_the_part_of_the_name_before_the_dot(name: str) -> None:
    assert SCORERS[name].engine == name.partition(".")[0]
    assert SCORERS[name].engine in ENGINES


def test_the_service_knows_every_scorer_and_variant() -> None:
    from probes.scorers.composition import VARIANTS
    from service.replay.probes.scorers import SCORERS as KNOWN
    from service.replay.probes.scorers import VARIANTS as KNOWN_VARIANTS

    assert set(SCORERS) <= set(KNOWN)
    assert set(VARIANTS) == set(KNOWN_VARIANTS)


def test_installed_engines_are_offered() -> None:
    assert {"torch.trainer", "torch.bfloat16", "torch.float32"} <= set(available_scorers())


def test_an_unknown_scorer_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedScoreError, match=r"torch\.trainer"):
        scorer_named("torch.float64")
