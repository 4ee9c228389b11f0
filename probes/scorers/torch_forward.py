"""Forward passes in torch: as in a trainer (`torch.trainer`), in pure bfloat16, and in float32.

`torch.trainer` reproduces a trainer's numerics, not its code: master weights in one dtype, autocast to another, rows
padded to the longest of a batch and masked, logits cast to float32 before log-softmax. With the defaults (bfloat16
autocast over float32 master weights, batches of 128 padded right) it equals the logged log-probs of a trainer with a
plain Hugging Face forward pass, bit for bit on the same kind of CPU. Sequence packing, tensor and sequence parallelism
and custom kernels are not covered; their effect is part of the link "not reproduced".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from foreshock.fingerprint import Fingerprint
from probes.fingerprints import score_fingerprint
from probes.scorers.composition import Composition, compose
from probes.scorers.forward_pass import PaddedBatch, head_in, load_model, next_token_log_probs
from probes.scorers.request import Options, Report, Scored, ScoreRequest, WarmModel, parse_options
from probes.scorers.sampling import divisors, sampled_temperature
from probes.scorers.tokens import check_tokens, sequence_lengths

__all__ = [
    "ForwardOptions",
    "ForwardPass",
    "TrainerOptions",
    "prepare_forward_pass",
    "score_as_trainer",
    "score_in_bfloat16",
    "score_in_float32",
]

Dtype = Literal["bfloat16", "float16", "float32"]


class ForwardOptions(Options):
    """Options of all forward passes: batching, attention, and the memory of logits in bytes.

    `logits_bytes` does not change the result. `temperature` divides the logits instead of the batch's temperature.
    """

    batch_size: int = Field(default=128, ge=1)
    padding: Literal["right", "left"] = "right"
    attention_implementation: str = "sdpa"
    temperature: float | None = Field(default=None, gt=0)
    logits_bytes: int = Field(default=1 << 30, ge=1)


class TrainerOptions(ForwardOptions):
    """Options of a trainer's precision.

    `autocast` None: everything in `master_dtype`. `head_dtype` None: the language-model head has no dtype of its own.
    """

    autocast: Literal["bfloat16", "float16"] | None = "bfloat16"
    master_dtype: Dtype = "float32"
    head_dtype: Dtype | None = None


def score_as_trainer(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `torch.trainer`: log π with the numerics of the trainer that the options describe."""
    return _score(request, parse_options(TrainerOptions, request), warm, report)


def score_in_bfloat16(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `torch.bfloat16`: weights and activations in bfloat16, no autocast."""
    chosen = parse_options(ForwardOptions, request).model_dump()
    return _score(request, TrainerOptions(**chosen, autocast=None, master_dtype="bfloat16"), warm, report)


def score_in_float32(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `torch.float32`: everything in float32, without TensorFloat-32; the reference precision."""
    chosen = parse_options(ForwardOptions, request).model_dump()
    return _score(request, TrainerOptions(**chosen, autocast=None, master_dtype="float32"), warm, report)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A loaded model with the numerics of the options, and the plan of its batches.

    `divisor` [N] divides the logits of each rollout. `head_dtype` None: the head is computed as the rest.
    """

    model: Any
    device: torch.device
    plan: Composition
    divisor: NDArray[np.float64]
    autocast: torch.dtype | None
    head_dtype: torch.dtype | None
    fingerprint: Fingerprint


def prepare_forward_pass(request: ScoreRequest, options: TrainerOptions, warm: WarmModel) -> ForwardPass:
    """Load the model, if it is not warm, and plan the batches. Raises UnsupportedScoreError."""
    rollouts = request.rollouts
    check_tokens(rollouts, request.weights_folder)
    divisor = divisors(rollouts, options.temperature)
    plan = compose(sequence_lengths(rollouts), options.batch_size, request.variant, padding=f"padded {options.padding}")
    device = torch.device("cuda" if request.accelerator != "cpu" and torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    model = warm.get(
        (request.weights_digest, options.master_dtype, options.attention_implementation, device.type),
        lambda: load_model(
            request.weights_folder, _dtype(options.master_dtype), options.attention_implementation, device
        ),
    )
    fingerprint = score_fingerprint(
        request,
        "torch",
        device,
        dtype=options.autocast or options.master_dtype,
        head_dtype=options.head_dtype or options.autocast or options.master_dtype,
        master_dtype=options.master_dtype,
        autocast=options.autocast,
        attention_backend=model.config._attn_implementation,
        batch_composition=plan.name,
        temperature=sampled_temperature(divisor),
        flags={"log_softmax": "float32", "float32_matmul_precision": torch.get_float32_matmul_precision()},
    )
    autocast = _dtype(options.autocast) if options.autocast else None
    head_dtype = _dtype(options.head_dtype) if options.head_dtype else None
    return ForwardPass(model, device, plan, divisor, autocast, head_dtype, fingerprint)


def _score(request: ScoreRequest, options: TrainerOptions, warm: WarmModel, report: Report) -> Scored:
    rollouts = request.rollouts
    forward = prepare_forward_pass(request, options, warm)
    log_probs = np.full(rollouts.num_tokens, np.nan, dtype=np.float32)
    done = 0
    with torch.no_grad(), head_in(forward.model, forward.head_dtype):
        for rows in forward.plan.batches:
            batch = PaddedBatch(rollouts, rows, options.padding, forward.device)
            found = next_token_log_probs(
                forward.model, batch, forward.divisor[rows], forward.autocast, options.logits_bytes
            )
            batch.write(found, log_probs)
            done += batch.num_response_tokens
            report(done)
    return Scored(log_probs=log_probs, fingerprint=forward.fingerprint)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
