"""The names that trainers log: what a curve shows of several names is what the detectors read at each step."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from foreshock.diagnosis.quantities import (
    ENTROPY_KEY,
    GRADIENT_NORM_KEY,
    LEARNING_RATE_KEY,
    NAMES,
    REWARD_KEY,
    names_of,
    preferred_values,
    quantities_of,
)
from tests.paths import DOCS

QUANTITIES = (REWARD_KEY, ENTROPY_KEY, GRADIENT_NORM_KEY, LEARNING_RATE_KEY)
DECLARED: tuple[dict[str, str], ...] = ({}, {"reward": "my/score"}, {"lr": "entropy", REWARD_KEY: "grad_norm"})
LOGGED = sorted({name for declared in DECLARED for name in names_of(QUANTITIES, declared)} | {"my/score", "loss"})


# A name is known with and without its prefix, at one rank.
@example(steps={0: {"actor/grad_norm": 1.0, "train/grad_norm": 0.0}}, declared={})
@given(
    steps=st.dictionaries(
        st.integers(0, 5), st.dictionaries(st.sampled_from(LOGGED), st.floats(-1e3, 1e3), max_size=6), max_size=5
    ),
    declared=st.sampled_from(DECLARED),
)
def test_curve_has_what_the_detectors_read(steps: dict[int, dict[str, float]], declared: dict[str, str]) -> None:
    scalars: dict[str, dict[int, float]] = {}
    for step, values in steps.items():
        for name, value in values.items():
            scalars.setdefault(name, {})[step] = value
    for quantity in QUANTITIES:
        curve = preferred_values(scalars, names_of([quantity], declared))
        assert list(curve) == sorted(curve)
        for step, values in steps.items():
            # Of a name with and without its prefix either may come first.
            plain = {name: value for name, value in values.items() if f"train/{name}" not in values}
            if plain == values:
                read = quantities_of(values, declared).get(quantity)
                assert curve.get(step) == read


def test_declared_name_is_the_only_one() -> None:
    assert names_of([REWARD_KEY], {"reward": "my/score"}) == ("my/score",)
    assert "entropy" not in names_of([ENTROPY_KEY], {"reward": "entropy"})


def test_rule_on_a_scalar_reads_it_also_if_it_is_declared_as_another_quantity() -> None:
    declared, quantities = {"reward": "my/score"}, ("scalars:my/score",)
    assert "my/score" in names_of(quantities, declared)
    read = quantities_of({"my/score": 0.5}, declared, quantities)
    assert read == {"scalars:my/score": 0.5, REWARD_KEY: 0.5}


def test_document_has_the_known_names() -> None:
    section = (DOCS / "connect-a-trainer.md").read_text().partition("## Names of scalars\n")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ")[1:] for row in section.splitlines() if row.startswith("| ") and "`" in row]
    assert rows == [[f"`{quantity}`", ", ".join(f"`{name}`" for name in names)] for quantity, names in NAMES.items()]
