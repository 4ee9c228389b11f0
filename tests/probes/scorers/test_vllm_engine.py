"""The options of vLLM's scorers become arguments of the engine; what is not chosen is vLLM's default."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreshock.rollouts import BatchAttributes
from foreshock_probes.scorers.forward_pass import LogitProcessing
from foreshock_probes.scorers.request import TooFewDevicesError, UnsupportedScoreError
from foreshock_probes.scorers.sampling import LoggedDistribution, divisors, sampled_temperature
from foreshock_probes.scorers.vllm_engine import VllmOptions, bind_ranks_to_cores, engine_arguments
from tests.probes.tiny import make_rollouts


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
def test_indivisible_models_are_refused(tmp_path: Path, configuration: dict[str, int], size: int, words: str) -> None:
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


PROCESSED: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}


@pytest.mark.parametrize(
    ("attributes", "columns", "expected"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "logprobs_mode": "raw_logprobs"}, {}, [1.0, 1.0, 1.0]),
        ({"temperature": 0.7}, {}, [1.0, 1.0, 1.0]),  # an unknown mode counts as raw
        ({"temperature": 0.5, **PROCESSED}, {}, [0.5, 0.5, 0.5]),
        ({"temperature": 0.5, **PROCESSED}, {"temperature": [2.0, float("nan"), 0.25]}, [2.0, 0.5, 0.25]),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **PROCESSED}, {}, [1.0, 1.0, 1.0]),
    ],
)
def test_divisors_are_the_temperatures_of_the_logged_distribution(
    attributes: dict[str, Any], columns: dict[str, Any], expected: list[float]
) -> None:
    rollouts = make_rollouts(3, attributes=BatchAttributes(**attributes), **columns)
    found = divisors(rollouts)
    assert found.tolist() == expected
    assert sampled_temperature(found) == (expected[0] if len(set(expected)) == 1 else None)
    assert divisors(rollouts, override=3.0).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("attributes", "columns", "words"),
    [
        ({"top_p": 0.9}, {}, "rollout 0 .* top_p"), ({"top_k": 20}, {}, "top_k"), ({"min_p": 0.1}, {}, "min_p"),
        ({"temperature": 0.0}, {}, "greedily"), ({}, {"top_p": [1.0, 1.0, 0.5]}, "rollout 2 .* top_p"),
    ],
)  # fmt: skip
def test_processed_log_probs_of_cut_ones_raise(attributes: dict[str, Any], columns: dict[str, Any], words: str) -> None:
    rollouts = make_rollouts(3, attributes=BatchAttributes(**PROCESSED, **attributes), **columns)
    with pytest.raises(UnsupportedScoreError, match=f"{words}.*raw_logprobs"):
        divisors(rollouts)


LOGITS = torch.log(torch.tensor([[0.05, 0.4, 0.3, 0.15, 0.1]]))


def kept(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> list[int]:
    one = LoggedDistribution(
        np.array([temperature]), np.array([top_p]), np.array([top_k], dtype=np.int64), np.array([min_p])
    )
    processed = LogitProcessing(one, torch.device("cpu"))(LOGITS, torch.tensor([0]))
    return torch.isfinite(processed[0]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.6}, [1, 2]),
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"top_p": 1e-6}, [1]),
        ({"min_p": 0.3}, [1, 2, 3]),
        # Of the three largest, 0.4/0.85 and 0.3/0.85 are 0.82 of the mass.
        ({"top_k": 3, "top_p": 0.8}, [1, 2]),
        # Squared probabilities, renormalised: 0.55, 0.31, 0.08, 0.03, 0.01.
        ({"temperature": 0.5, "top_p": 0.9}, [1, 2, 3]),
        ({"temperature": 0.5, "min_p": 0.3}, [1, 2]),
    ],
)
def test_tokens_kept(distribution: dict[str, float], expected: list[int]) -> None:
    assert kept(**distribution) == expected  # type: ignore[arg-type]


def test_rows_have_their_own_distribution() -> None:
    mixed = LoggedDistribution(np.array([1.0, 2.0]), np.array([1.0, 0.6]), np.zeros(2, dtype=np.int64), np.zeros(2))
    processed = LogitProcessing(mixed, torch.device("cpu"))(LOGITS.repeat(3, 1), torch.tensor([0, 1, 0]))
    assert torch.equal(processed[0], LOGITS[0])
    assert torch.equal(processed[2], LOGITS[0])
    assert torch.isfinite(processed[1]).sum() < 5
