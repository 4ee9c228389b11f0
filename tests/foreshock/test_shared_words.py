"""Errors, digests and fingerprints: what every part says in the same words."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

import foreshock
from foreshock import clock, errors
from foreshock.digests import (
    canonical_json,
    digest_of_bytes,
    digest_of_json,
    rollout_set_digest,
    weights_digest,
)
from foreshock.fingerprint import Fingerprint


def test_an_error_says_row_column_and_what_to_do() -> None:
    error = errors.InvalidRolloutsError("is negative: ids start at 0", row=3, column="turn")
    assert str(error) == "row 3, column `turn`: is negative: ids start at 0"
    assert (error.row, error.column, error.message) == (3, "turn", "is negative: ids start at 0")


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRolloutsError("wrong", row=1, column="reward"),
        errors.LimitExceededError("too many", column="sample_id"),
        errors.ServiceError("no", status=409, problem={"title": "conflict"}),
        errors.WeightsError("gone"),
    ],
)
def test_errors_come_whole_out_of_another_process(error: errors.ForeshockError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_is_a_foreshock_error() -> None:
    assert all(issubclass(getattr(errors, name), errors.ForeshockError) for name in errors.__all__)


def test_the_clock_counts_microseconds() -> None:
    assert abs(clock.now_us() - time.time() * 1e6) < 5e6


def test_importing_the_library_imports_nothing_heavy() -> None:
    heavy = "numpy pyarrow httpx torch fastapi sqlalchemy"
    code = f"import sys, foreshock; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_rollout_batch_is_a_public_name_and_an_unknown_name_is_an_attribute_error() -> None:
    assert foreshock.RolloutBatch.__name__ == "RolloutBatch"
    assert set(foreshock.__all__) <= set(dir(foreshock))
    with pytest.raises(AttributeError, match="no attribute 'Rollouts'"):
        _ = foreshock.Rollouts  # type: ignore[attr-defined]


def test_digests_of_bytes_are_sha256() -> None:
    assert digest_of_bytes(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": 1, "a": ["μ", None]}) == '{"a":["μ",null],"b":1}'
    assert digest_of_json({"a": 1, "b": 2}) == digest_of_json({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_a_rollout_set_has_no_order_but_has_borders() -> None:
    assert rollout_set_digest(["a", "b"]) == rollout_set_digest(["b", "a"])
    assert rollout_set_digest(["ab", "c"]) != rollout_set_digest(["a", "bc"])


def test_weights_digest_sees_content_names_and_config_and_nothing_else(tmp_path: Path) -> None:
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


def test_weights_that_are_not_there_are_an_error_without_a_path(tmp_path: Path) -> None:
    with pytest.raises(errors.WeightsError, match="cannot be read"):
        weights_digest(tmp_path / "gone")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(errors.WeightsError, match="safetensors") as caught:
        weights_digest(tmp_path)
    assert str(tmp_path.parent) not in str(caught.value)


def test_a_fingerprint_is_the_same_however_it_was_written() -> None:
    one = Fingerprint("vllm", flags={"b": "1", "a": "2"}, temperature=1, top_k=-1)
    two = Fingerprint.from_json(
        json.dumps({"top_k": -1, "temperature": 1.0, "flags": {"a": "2", "b": "1"}, "engine": "vllm"})
    )
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest() == two.digest()
    assert one.digest() != Fingerprint("vllm", temperature=1.0).digest()


def test_a_fingerprint_of_a_newer_release_is_read_without_its_news() -> None:
    assert Fingerprint.from_json('{"engine":"vllm","colour":"red"}') == Fingerprint("vllm")


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "{}", '{"engine":1}', '{"engine":"v","top_k":1.5}', '{"engine":"v","flags":{"a":1}}',
     '{"engine":"v","temperature":true}', '{"engine":"v","temperature":NaN}', '{"engine":""}'],
)  # fmt: skip
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(errors.ConfigurationError):
        Fingerprint.from_json(text)
