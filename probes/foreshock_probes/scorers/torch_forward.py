"""Forward passes in torch: as in a trainer (`torch.trainer`), in pure bfloat16, and in float32.

`torch.trainer` reproduces a trainer's numerics, not its code: master weights in one dtype, autocast to another, rows
padded to the longest of a batch and masked, logits cast to float32 before log-softmax. With the defaults (bfloat16
autocast over float32 master weights, batches of 128 padded right) it equals the logged log-probs of a trainer with a
plain Hugging Face forward pass, bit for bit on the same kind of CPU. `padding` none concatenates rows without padding,
as trainers pack sequences. A trainer's own parallelism and custom kernels are not covered; their effect is part of the
link "not reproduced".
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch
from foreshock_probes.scorers.forward_pass import (
    LogitProcessing,
    TokenBatch,
    check_packing,
    head_in,
    load_model,
    next_token_log_probs,
)
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
from foreshock_probes.scorers.sampling import LoggedDistribution, Truncation, logged_distribution
from foreshock_probes.scorers.tokens import Composition, check_tokens, compose, sequence_lengths

Dtype = Literal["bfloat16", "float16", "float32"]
_ONE_DTYPE: dict[str, Dtype] = {"torch.bfloat16": "bfloat16", "torch.float32": "float32"}


class ForwardOptions(Options):
    """Options of all forward passes: batching, attention, and the memory of logits in bytes.

    `batching`: rows in their own order, or rows of similar length with at most 5 % padding. A batch has at most
    `batch_size` rows and `batch_tokens` tokens, padding included; a longer row is a batch of its own. `padding` none:
    the rows of a batch are concatenated, with positions that restart and attention within each (the time of the
    implementations sdpa and eager then grows with the square of `batch_tokens`). `logits_bytes` bounds memory and
    does not change the result. `temperature` divides the logits instead of the batch's temperature.
    `truncation` of processed log-probs (top-p, top-k, min-p): trainers do not truncate, so a run that does is refused
    unless the option says whether to follow the engine that sampled.

    For models larger than one GPU: `device_map` is transformers' argument of that name ("auto": the layers one after
    another on all GPUs). `tp_size` divides each layer among so many processes, by transformers' `tp_plan`, which
    changes the order of sums.
    """

    batching: Literal["in_order", "by_length"] = "by_length"
    batch_size: int = Field(default=128, ge=1)
    batch_tokens: int = Field(default=16_384, ge=1)
    padding: Literal["right", "left", "none"] = "right"
    attention_implementation: str = "sdpa"
    temperature: float | None = Field(default=None, gt=0)
    truncation: Truncation = "refuse"
    logits_bytes: int = Field(default=256 << 20, ge=1)
    device_map: str | None = None
    tp_size: int = Field(default=1, ge=1)


class TrainerOptions(ForwardOptions):
    """Options of a trainer's precision.

    `autocast` None: everything in `master_dtype`. `head_dtype` None: the language-model head has no dtype of its own.
    """

    batching: Literal["in_order", "by_length"] = "in_order"
    autocast: Literal["bfloat16", "float16"] | None = "bfloat16"
    master_dtype: Dtype = "float32"
    head_dtype: Dtype | None = None


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request. Raises UnsupportedScoreError if that cannot be done correctly."""
    options = forward_options(request)
    return run_forward_pass(prepare_forward_pass(request, options, warm), request.rollouts, options, report)


def forward_options(request: ScoreRequest) -> TrainerOptions:
    """Return the options of the request's scorer.

    `torch.trainer` takes the trainer's precision. `torch.bfloat16` and `torch.float32` have weights and activations in
    one dtype. `torch.float32` is the reference precision and does not use TensorFloat-32.
    """
    if request.scorer not in _ONE_DTYPE:
        return parse_options(TrainerOptions, request)
    given = parse_options(ForwardOptions, request).model_dump()
    return TrainerOptions(**given, autocast=None, master_dtype=_ONE_DTYPE[request.scorer])


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A loaded model with the numerics of the options, and the plan of its batches.

    `distribution` is the processing of each rollout's logits. `head_dtype` None: the head is computed like the rest.
    """

    model: Any
    device: torch.device
    plan: Composition
    distribution: LoggedDistribution
    autocast: torch.dtype | None
    head_dtype: torch.dtype | None
    fingerprint: Fingerprint


def prepare_forward_pass(request: ScoreRequest, options: TrainerOptions, warm: WarmModel) -> ForwardPass:
    """Load the model if it is not warm, and plan the batches. Raises UnsupportedScoreError."""
    _check_division(request, options)
    rollouts = request.rollouts
    check_tokens(rollouts, request.weights_folder)
    distribution = logged_distribution(rollouts, options.temperature, options.truncation)
    plan = plan_of(request, options)
    device = torch.device("cuda" if uses_gpu(request) else "cpu")
    torch.set_float32_matmul_precision("highest")
    tp_size = options.tp_size if options.tp_size > 1 else None
    division = {"device_map": options.device_map, "tp_size": tp_size}
    model = warm.get(
        (request.weights_digest, options.master_dtype, options.attention_implementation, device.type, str(division)),
        lambda: load_model(
            request.weights_folder,
            _dtype(options.master_dtype),
            options.attention_implementation,
            device,
            device_map=options.device_map,
            tp_size=tp_size,
            adapter=request.adapter,
        ),
    )
    if options.padding == "none":
        check_packing(model)
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
        flags={
            "log_softmax": "float32",
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            **{name: str(value) for name, value in division.items() if value is not None},
        },
        **distribution.fingerprint_fields(),
    )
    autocast = _dtype(options.autocast) if options.autocast else None
    head_dtype = _dtype(options.head_dtype) if options.head_dtype else None
    return ForwardPass(model, device, plan, distribution, autocast, head_dtype, fingerprint)


def _check_division(request: ScoreRequest, options: TrainerOptions) -> None:
    """Raise UnsupportedScoreError if the options divide a model in a way that this process cannot."""
    if options.tp_size == 1:
        return
    if options.device_map is not None or options.head_dtype is not None or request.adapter is not None:
        raise UnsupportedScoreError(
            f"{request.scorer}: tp_size cannot be combined with device_map, head_dtype or a LoRA adapter"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) != options.tp_size:
        raise UnsupportedScoreError(f"{request.scorer}: this needs the whole model in one process: tp_size=1")


def uses_gpu(request: ScoreRequest) -> bool:
    """Return True if the request is for a GPU and this machine has one."""
    return request.accelerator != "cpu" and torch.cuda.is_available()


def plan_of(request: ScoreRequest, options: ForwardOptions) -> Composition:
    """Return the batches of the request's rollouts."""
    lengths, packed = sequence_lengths(request.rollouts), options.padding == "none"
    padding = "packed without padding" if packed else f"padded {options.padding}"
    rows, tokens, by_length = options.batch_size, options.batch_tokens, options.batching == "by_length"
    return compose(lengths, rows, request.variant, padding, tokens, packed=packed, by_length=by_length)


def run_forward_pass(
    forward: ForwardPass,
    rollouts: RolloutBatch,
    options: TrainerOptions,
    report: Report,
    after_batch: Callable[[TokenBatch], None] | None = None,
) -> Scored:
    """Return the log-probs of the rollouts' response tokens; `after_batch` is called after each forward pass."""
    log_probs = np.full(rollouts.num_tokens, np.nan, dtype=np.float32)
    done = 0
    with torch.no_grad(), head_in(forward.model, forward.head_dtype):
        for rows in forward.plan.batches:
            batch = TokenBatch(rollouts, rows, options.padding, forward.device)
            process = LogitProcessing(forward.distribution.of(rows), forward.device)
            found = next_token_log_probs(forward.model, batch, process, forward.autocast, options.logits_bytes)
            batch.write(found.float().cpu().numpy(), log_probs)
            if after_batch is not None:
                after_batch(batch)
            done += batch.num_response_tokens
            report(done)
    return Scored(log_probs=log_probs, fingerprint=forward.fingerprint)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
