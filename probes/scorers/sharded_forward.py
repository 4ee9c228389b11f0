"""Forward passes of a model that is divided among several processes: the option `shards` of torch's scorers.

The processes share the parameters (`foreshock_probes.scorers.sharded_model`) and divide the batches: each computes
every n-th one, with the same composition and the same operations as an undivided model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock_probes.scorers.devices import check_devices
from foreshock_probes.scorers.forward_pass import TokenBatch, check_logits, head_in, logits_fit, precision
from foreshock_probes.scorers.rank_processes import Rank, RankProcesses
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, WarmModel
from foreshock_probes.scorers.sharded_model import load_sharded_model
from foreshock_probes.scorers.torch_forward import (
    ForwardPass,
    TrainerOptions,
    prepare_forward_pass,
    score_batch,
    uses_gpu,
)

__all__ = ["score_on_ranks"]


@dataclass(frozen=True, slots=True)
class _Task:
    request: ScoreRequest
    options: TrainerOptions


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A rank's log-probs [T], NaN at tokens of other ranks, and the seconds that it took to load the model."""

    log_probs: NDArray[np.float32]
    fingerprint: Fingerprint
    loading_seconds: float


def score_on_ranks(request: ScoreRequest, options: TrainerOptions, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request in `options.shards` processes, which stay for the next request.

    Raises UnsupportedScoreError, TooFewDevicesError if there are fewer devices than shards, and RankError.
    """
    check_devices("shards", options.shards)
    on_gpus = uses_gpu(request)
    ranks = warm.get(
        ("ranks", options.shards, on_gpus), lambda: RankProcesses(options.shards, _score_part, on_gpus=on_gpus)
    )
    try:
        parts: list[_Part] = ranks.run(_Task(request, options), report)
    except BaseException:
        warm.drop()
        raise
    warm.loading_seconds += max(part.loading_seconds for part in parts)
    log_probs = parts[0].log_probs.copy()
    for part in parts[1:]:
        known = ~np.isnan(part.log_probs)
        log_probs[known] = part.log_probs[known]
    return Scored(log_probs=log_probs, fingerprint=parts[0].fingerprint)


def _score_part(rank: Rank, task: _Task, report: Report) -> _Part:
    """Score the rank's batches. All ranks call the decoder equally often, because each call gathers its parameters."""
    request, options, before = task.request, task.options, rank.warm.loading_seconds
    flags = {"shards": str(rank.ranks)}
    forward = prepare_forward_pass(request, options, rank.warm, flags, load=load_sharded_model, device=rank.device)
    log_probs = np.full(request.rollouts.num_tokens, np.nan, dtype=np.float32)
    batches = forward.plan.batches
    done = 0
    with torch.no_grad(), head_in(forward.model, forward.head_dtype):
        _check_logits(forward, request, options)
        for turn in range(math.ceil(len(batches) / rank.ranks)):
            index = turn * rank.ranks + rank.number
            batch = _batch(request, options, batches[index], rank.device) if index < len(batches) else None
            if batch is None or batch.ids.shape[1] < 2:
                _call_decoder(forward)
            else:
                score_batch(forward, batch, batches[index], options, log_probs)
            done += batch.num_response_tokens if batch is not None else 0
            report(done)
    return _Part(log_probs, forward.fingerprint, rank.warm.loading_seconds - before)


def _batch(request: ScoreRequest, options: TrainerOptions, rows: NDArray[np.int64], device: torch.device) -> TokenBatch:
    return TokenBatch(request.rollouts, rows, options.padding, device)


def _check_logits(forward: ForwardPass, request: ScoreRequest, options: TrainerOptions) -> None:
    """Check the model in all ranks, if a batch of any rank needs its logits in pieces: the check calls the decoder."""
    cpu = torch.device("cpu")
    sizes = (_batch(request, options, rows, cpu).ids.shape for rows in forward.plan.batches)
    if not all(logits_fit(forward.model, size, options.logits_bytes) for size in sizes):
        with precision(forward.device, forward.autocast):
            check_logits(forward.model, torch.arange(2, device=forward.device)[None])


def _call_decoder(forward: ForwardPass) -> None:
    ids: Any = torch.zeros((1, 2), dtype=torch.int64, device=forward.device)
    with precision(forward.device, forward.autocast):
        forward.model.get_decoder()(input_ids=ids, use_cache=False)
