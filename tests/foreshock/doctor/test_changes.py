"""Changes hold any value of a config.json, and give it back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreshock.doctor.changes import Change, hashable, json_value

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=9
)


@given(value=values)
def test_value_of_a_configuration_comes_back_from_a_change(value: object) -> None:
    change = Change.of(weights="step_10", config=("field", hashable(value)))
    assert {change: 1}[Change.of(config=("field", hashable(value)), weights="step_10")] == 1
    assert json_value(change.get("config")[1]) == value


def test_order_of_a_dictionary_has_no_meaning() -> None:
    first, second = {"theta": 1e4, "kind": ["a", "b"]}, {"kind": ["a", "b"], "theta": 1e4}
    assert hash(hashable(first)) == hash(hashable(second))
    assert hashable(first) == hashable(second)
