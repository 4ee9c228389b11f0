"""Certificates for tests: rows of known differences."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.certify.certificate import SCHEMA, Certificate, Row
from foreshock.certify.judging import judged
from foreshock.certify.text import sentence_of
from foreshock.rollouts import RolloutBatch

PROMPTS, TOKENS = 16, 40
Float32 = NDArray[np.float32]


def tokens_of(seed: int = 0) -> RolloutBatch:
    random = np.random.default_rng(seed)
    names = [f"p{row}" for row in range(PROMPTS)]
    ids = random.integers(0, 50, (PROMPTS, TOKENS)).tolist()
    return RolloutBatch.from_lists(names, [[1, 2, 3]] * PROMPTS, ids, group_ids=names)


def log_probs(seed: int, noise: float = 0.0, truth: int = 7) -> Float32:
    """Return log-probs [T] around -2 with independent noise."""
    values = np.random.default_rng(truth).normal(-2.0, 0.5, PROMPTS * TOKENS).clip(max=-0.1)
    values = values + noise * np.random.default_rng(seed).normal(size=values.size)
    return values.clip(max=-1e-3).astype(np.float32)


def replays(noise: float = 0.01) -> list[Float32]:
    return [log_probs(seed, noise) for seed in (101, 102, 103)]


def row(name: str, noise: float, seed: int = 1, **fields: Any) -> Row:
    """Return a row whose two computations differ by this noise; 0.01 is within the floor."""
    verdict, size = judged(tokens_of(), log_probs(seed, noise), log_probs(0), replays(), "bfloat16")
    return Row(
        name=name, title=name, verdict=verdict, sentence=sentence_of(verdict, [size]), sizes=(size,),
        rollouts="sha256:0", **fields,
    )  # fmt: skip


def not_tried(name: str, why: str) -> Row:
    return Row(name=name, title=name, verdict="not tried", sentence=why)


def certificate(*rows: Row, **fields: Any) -> Certificate:
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "model": "tiny",
        "model_digest": "sha256:" + "a" * 64,
        "architecture": "Qwen3ForCausalLM",
        "model_kind": "dense",
        "parameters": 30_000,
        "engines": ("vllm.decode",),
        "trainer": "torch.bfloat16",
        "made_at": "2026-11-29T12:00:00Z",
        "seconds": 61.0,
        "ended": "complete",
    }
    return Certificate(**(values | fields), rows=rows)
