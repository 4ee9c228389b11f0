"""Floats as JSON can hold them."""

from __future__ import annotations

import json
import math

from foreshock.json_values import finite_or_none, json_value


def test_only_finite_numbers_are_kept() -> None:
    assert [finite_or_none(value) for value in (1.5, None, math.nan, math.inf, -math.inf)] == [1.5] + [None] * 4


def test_nested_values_become_strict_json() -> None:
    value = {"curve": (1.0, math.nan, [math.inf, 2]), "name": "k3_kl", "flag": True, "nothing": None}
    plain = json_value(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == {**value, "curve": [1.0, None, [None, 2]]}
