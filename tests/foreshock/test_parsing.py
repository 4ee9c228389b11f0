"""Texts from outside: whatever is wrong with them is an error that each reader of the library expects."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from foreshock.client.deliveries import Delivery
from foreshock.diagnosis.rule_files import InvalidRules, parse_rules, read_rules
from foreshock.errors import ConfigurationError, ForeshockError
from foreshock.fingerprint import Fingerprint
from foreshock.json_values import finite_or_none, json_bytes, json_value
from foreshock.model_kind import model_kind_of_folder
from foreshock.parsing import parse_json, parse_toml
from foreshock.rollouts.attributes import BatchAttributes

DEPTHS = (50, 400, 900, 2_000, 100_000)


@pytest.mark.parametrize("parse", [parse_json, lambda text: parse_toml(f"a = {text}")], ids=["JSON", "TOML"])
def test_deep_nesting_is_an_invalid_value(parse: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse("[" * 5_000)
    with pytest.raises(ValueError):
        parse('{"a":')


@pytest.mark.parametrize("depth", DEPTHS)
def test_readers_refuse_deep_nesting_as_any_other_invalid_text(depth: int, tmp_path: Path) -> None:
    lists = "[" * depth + "]" * depth
    for text in (
        f"version = {lists}",
        f"[rules.mismatch_rise]\nrelative = {lists}",
        f"[rules{'.a' * min(depth, 10_000)}]",
    ):
        with pytest.raises(InvalidRules):
            parse_rules(text)
        (tmp_path / "rules.toml").write_text(text)
        with pytest.raises(InvalidRules, match=r"rules\.toml, line \d"):
            read_rules(tmp_path / "rules.toml")
    for read in (Fingerprint.from_json, BatchAttributes.from_json):
        with pytest.raises(ForeshockError):
            read(lists)
    with pytest.raises(ValueError, match=r"metadata|nested"):
        Delivery.from_metadata(lists, b"")
    (tmp_path / "config.json").write_text(lists)
    assert model_kind_of_folder(tmp_path) is None


def test_arguments_that_are_nested_too_deeply_are_named() -> None:
    nested: list[object] = []
    for _ in range(5_000):
        nested = [nested]
    with pytest.raises(ConfigurationError, match="JSON values"):
        json_bytes({"a": nested})


def test_only_finite_numbers_are_kept() -> None:
    assert [finite_or_none(value) for value in (1.5, None, math.nan, math.inf, -math.inf)] == [1.5] + [None] * 4


def test_nested_values_become_strict_json() -> None:
    value = {"curve": (1.0, math.nan, [math.inf, 2]), "name": "k3_kl", "flag": True, "nothing": None}
    plain = json_value(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == {**value, "curve": [1.0, None, [None, 2]]}
