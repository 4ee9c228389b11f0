"""The options of vLLM's scorers become arguments of the engine; what is not chosen is vLLM's default."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock_probes.scorers.request import TooFewDevicesError, UnsupportedScoreError
from foreshock_probes.scorers.vllm_engine import VllmOptions, bind_ranks_to_cores, engine_arguments


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    return engine_arguments(folder, VllmOptions(**options), longest=40)


def test_defaults_are_eager_without_prefix_cache(checkpoints: Path) -> None:
    found = arguments(checkpoints / "first")
    assert (found["enforce_eager"], found["enable_prefix_caching"]) == (True, False)
    assert not {"enable_chunked_prefill", "disable_cascade_attn", "max_num_batched_tokens"} & set(found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"enforce_eager": False}, {"enforce_eager": False}),
        ({"prefix_caching": True}, {"enable_prefix_caching": True}),
        ({"chunked_prefill": False}, {"enable_chunked_prefill": False}),
        ({"cascade_attention": False}, {"disable_cascade_attn": True}),
        ({"max_num_batched_tokens": 256}, {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}),
        (
            {"max_num_batched_tokens": 64, "chunked_prefill": False},
            {"max_num_batched_tokens": 64, "max_num_seqs": 64, "enable_chunked_prefill": False},
        ),
    ],
)
def test_each_option_is_an_argument(checkpoints: Path, options: dict[str, Any], expected: dict[str, Any]) -> None:
    found = arguments(checkpoints / "first", **options)
    assert {name: found[name] for name in expected} == expected


def test_memory_bounds_a_larger_request(checkpoints: Path) -> None:
    found = arguments(checkpoints / "first", logits_bytes=10 * 24 * 100, max_num_batched_tokens=256)
    assert found["max_num_batched_tokens"] == 100


@pytest.mark.parametrize(
    ("configuration", "size", "words"),
    [
        ({}, 3, "num_attention_heads=2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 66}, 2, "num_key_value_heads=3"),
        ({"intermediate_size": 65}, 2, "intermediate_size=65"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    tmp_path: Path, configuration: dict[str, int], size: int, words: str
) -> None:
    with pytest.raises(UnsupportedScoreError, match=words):
        arguments(configured(tmp_path, **configuration), tensor_parallel_size=size)


def test_key_value_heads_may_be_fewer_than_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock_probes.scorers.devices.device_count", lambda: 2)
    assert arguments(configured(tmp_path), tensor_parallel_size=2)["tensor_parallel_size"] == 2


def test_more_processes_than_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock_probes.scorers.devices.device_count", lambda: 1)
    with pytest.raises(TooFewDevicesError, match=r"tensor_parallel_size=2 .* this worker has 1"):
        arguments(configured(tmp_path), tensor_parallel_size=2)


def test_processes_on_a_cpu_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "environ", {})
    bind_ranks_to_cores(1)
    assert os.environ == {}
    bind_ranks_to_cores(2)
    assert os.environ == {"VLLM_CPU_OMP_THREADS_BIND": "0,1|2,3"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    bind_ranks_to_cores(2)
    assert os.environ == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def configured(folder: Path, **values: int) -> Path:
    """Write the config.json of a model with two attention heads and one key-value head."""
    configuration = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 24}
    (folder / "config.json").write_text(json.dumps(configuration | values), "utf-8")
    return folder
