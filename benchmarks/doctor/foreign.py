"""Injections that no row of the catalogue describes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.doctor.case import Case
from benchmarks.doctor.lab import Pass, score, updated, with_config


def noisy(case: Case, logits: torch.Tensor, *_: object) -> torch.Tensor:
    """Noise that no two passes share."""
    return logits + 0.4 * torch.randn_like(logits)


def growing_temperature(
    case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int
) -> torch.Tensor:
    return logits / (0.5 + 0.06 * step)


def dropout(case: Case) -> None:
    model = with_config(case.model, attention_dropout=0.2)
    case.rescored(Pass(train=True), model)


def random_updates(case: Case) -> None:
    """Weights that nobody announced."""
    case.sampled(updated(case.model, case.seed + 99, 0.08))


def heads(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if "o_proj" in name:
            value.copy_(value.roll(16, 1))


def wrong_prompt(case: Case) -> None:
    other = copy.deepcopy(case.rows)
    other.prompts = [[*prompt[:2], 2 + (prompt[2] + 1) % 13, *prompt[3:]] for prompt in other.prompts]
    case.rows.mu = score(case.model, other, Pass("bfloat16"))


def tail(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    random = np.random.default_rng(case.seed * 100 + row)
    values[-6:] = np.minimum(values[-6:] + random.normal(0, 1, values[-6:].shape), 0)
    return values


def offset(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    """Each rollout has an offset of its own."""
    return np.asarray(np.minimum(values + np.float32(0.5 * np.sin(row)), 0))


def scaled(part: str, factor: float) -> Callable[[Case, dict[str, torch.Tensor]], None]:
    """Scale the tensors whose name has `part`."""

    def edit(case: Case, tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            if part in name:
                value.mul_(factor)

    return edit


def noisy_embeddings(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    value = tensors["model.embed_tokens.weight"]
    value.add_(0.15 * torch.randn_like(value))


def exchanged_rows(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    value = tensors["lm_head.weight"]
    value.copy_(value[[0, 1, 3, 2, 5, 4, *range(6, len(value))]])


def head_lost(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """One head of one layer adds nothing."""
    tensors["model.layers.1.self_attn.o_proj.weight"][:, :16] = 0


def values_exchanged(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """The values of the key-value heads are in another order, their keys are not."""
    for name, value in tensors.items():
        if "v_proj" in name:
            value.copy_(value.roll(16, 0))


def experts_alike(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """The second expert of each layer is a copy of the first."""
    for name, value in tensors.items():
        if "experts" in name:
            value[1] = value[0]


def smoothed(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    """Each log-prob is a mean over three tokens."""
    wide = np.pad(values, 1, mode="edge")
    return ((wide[:-2] + wide[1:-1] + wide[2:]) / 3).astype(np.float32)
