"""Healthy cases: other precisions, batches and instruction sets, a declared lag, and trainings that go wrong."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.doctor.case import Case
from benchmarks.doctor.lab import Pass, Rows, sample, score

_NO_WIDE_VECTORS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
Reward = Callable[[list[int]], float]


def precision(side: str, precision: str, size: int = 16) -> Callable[[Case], None]:
    """Return a side that scores in another precision, or in other batches."""
    return lambda case: case.rescored(Pass(precision, size=size), side=side)


def declared_lag(case: Case) -> None:
    """The engine samples with older weights, which the rollouts declare."""
    case.sampled(case.old)
    case.columns = {"weights_version": [[7] * len(each) for each in case.rows.responses]}


def other_instructions(side: str) -> Callable[[Case], None]:
    """Return a side that scores in a process whose torch and oneDNN do not use the wide vectors of this CPU."""

    def inject(case: Case) -> None:
        how = Pass("bfloat16" if side == "rollout" else "autocast")
        with (
            patch.dict(os.environ, _NO_WIDE_VECTORS),
            ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        ):
            case.log(side, pool.submit(score, case.model, case.rows, how).result())

    return inject


def too_fast(case: Case) -> None:
    """Train at a learning rate that breaks the policy; engine and trainer both hold the new weights."""
    _trained(case, lambda response: float(len(response)), learning_rate=0.05, updates=3)


def gamed(case: Case) -> None:
    """Train on a reward that counts one id, until the policy repeats it."""
    _trained(case, lambda response: response.count(5) / len(response), learning_rate=0.01, updates=15)


def _trained(case: Case, reward: Reward, learning_rate: float, updates: int) -> None:
    """Start the case from the policy after updates by REINFORCE; the weights before the updates are known too."""
    case.old, case.model = case.model, copy.deepcopy(case.model)
    optimizer = torch.optim.Adam(case.model.parameters(), lr=learning_rate)
    prompts = [case.rows.prompts[case.rows.groups.index(group)] for group in sorted(set(case.rows.groups))]
    for update in range(updates):
        rows = sample(case.model, prompts, case.seed + update)
        rewards = np.array([reward(each) for each in rows.responses])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        optimizer.zero_grad()
        torch.autograd.backward(_loss(case.model, rows, torch.from_numpy(advantages).float()))
        optimizer.step()
    case.sampled()
    case.columns = {"reward": [reward(each) for each in case.rows.responses]}


def _loss(model: torch.nn.Module, rows: Rows, advantages: torch.Tensor) -> torch.Tensor:
    """Return the loss of REINFORCE over the response tokens of rows padded on the right."""
    sequences = [torch.tensor(each) for each in rows.sequences]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    log_probs = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    places = torch.arange(1, ids.shape[1])[None]
    first = torch.tensor([len(each) for each in rows.prompts])[:, None]
    last = torch.tensor([len(each) for each in sequences])[:, None]
    taken = (places >= first) & (places < last)
    loss: torch.Tensor = -(advantages[:, None] * log_probs * taken).sum() / taken.sum()
    return loss
