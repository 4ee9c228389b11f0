"""`torch.own`: the trainer's own forward pass, a function of the user that this worker calls.

    FORESHOCK_TRAINER_FORWARD=my_package.replay:load foreshock worker

`load(weights_folder)` loads a checkpoint once and returns `forward(batch)`. `forward` returns the log-probs [T], in
nats, of all response tokens of a `foreshock.rollouts.RolloutBatch`. Its attributes `dtype`, `head_dtype`,
`master_dtype`, `autocast` and `attention_backend`, if `load` sets them, go into the fingerprint.
`examples/trainer_forward.py` has such functions for FSDP2, TRL and verl. Only the worker's configuration names the
function, never a request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreshock.rollouts import RolloutBatch
from foreshock_probes.offers import imported
from foreshock_probes.scorers.request import (
    Options,
    Report,
    Scored,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    parse_options,
    score_fingerprint,
)
from foreshock_probes.scorers.torch_forward import uses_gpu
from foreshock_probes.settings import load_settings

Forward = Callable[[RolloutBatch], Any]
Load = Callable[[Path], Forward]
_FIELDS = ("dtype", "head_dtype", "master_dtype", "autocast", "attention_backend")


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens with the configured function; the variant "rebatched" reverses the rollouts.

    Raises UnsupportedScoreError if the function's answer is not one finite log-prob for each response token.
    """
    parse_options(Options, request)
    name = load_settings().trainer_forward
    forward: Forward = warm.get((request.weights_digest, name), lambda: imported(name)(request.weights_folder))
    rollouts = request.rollouts
    order = np.arange(rollouts.num_rollouts)[:: -1 if request.variant else 1]
    found = np.asarray(forward(rollouts.select(order)), np.float32)
    if found.shape != (rollouts.num_tokens,) or not np.isfinite(found).all():
        wrong = f"shape {list(found.shape)}, {np.count_nonzero(~np.isfinite(found))} not finite"
        raise UnsupportedScoreError(
            f"{name} must return {rollouts.num_tokens} finite log-probs, one for each response token, got {wrong}"
        )
    lengths = rollouts.response_lengths
    log_probs = np.concatenate(np.split(found, np.cumsum(lengths[order])[:-1])[:: -1 if request.variant else 1])
    report(rollouts.num_tokens)
    device = torch.device("cuda" if uses_gpu(request) else "cpu")
    known = {field: value for field in _FIELDS if (value := getattr(forward, field, None)) is not None}
    fingerprint = score_fingerprint(
        request, "torch", device, flags={"forward": name}, batch_composition=request.variant or "the function's own",
        temperature=1.0, **known,
    )  # fmt: skip
    return Scored(log_probs=log_probs, fingerprint=fingerprint)
