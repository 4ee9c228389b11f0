"""Digests of bytes, JSON values, sets of rollouts and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreshock.digests import canonical_json, digest_of_bytes, digest_of_json, rollout_set_digest, weights_digest
from foreshock.errors import WeightsError


def test_digest_of_bytes_is_sha256() -> None:
    assert digest_of_bytes(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_canonical_json_is_unique() -> None:
    assert canonical_json({"b": 1, "a": ["μ", None]}) == '{"a":["μ",null],"b":1}'
    assert digest_of_json({"a": 1, "b": 2}) == digest_of_json({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_rollout_set_digest_ignores_order_and_separates_ids() -> None:
    assert rollout_set_digest(["a", "b"]) == rollout_set_digest(["b", "a"])
    assert rollout_set_digest(["ab", "c"]) != rollout_set_digest(["a", "bc"])


def test_weights_digest_covers_safetensors_and_config_only(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    first = weights_digest(tmp_path)
    (tmp_path / "README.md").write_text("not weights")
    assert weights_digest(tmp_path) == first
    (tmp_path / "config.json").write_text('{"a":1}')
    assert weights_digest(tmp_path) != first
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert weights_digest(tmp_path) != first


def test_missing_weights_error_hides_parent_path(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read"):
        weights_digest(tmp_path / "gone")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="safetensors") as caught:
        weights_digest(tmp_path)
    assert str(tmp_path.parent) not in str(caught.value)
