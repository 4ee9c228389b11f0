"""`vllm.prefill`: the log-probs of vLLM's prefill, with prompt and response passed as one prompt.

These are the engine's own numerics (kernels, dtype, head) without the state of sampling: compared with `rollout` they
show the effect of decoding, caches and stale weights, compared with `torch.trainer` that of engine against trainer.

vLLM's prompt log-probs are always raw; a temperature is applied to the logits that the model returns. Multimodal
prompts, LoRA adapters, and log-probs under top-p, top-k or min-p are not covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock_probes.scorers.composition import compose
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, WarmModel, parse_options
from foreshock_probes.scorers.tokens import sequence, sequence_lengths
from foreshock_probes.scorers.vllm_arguments import VllmOptions
from foreshock_probes.scorers.vllm_engine import prepare_engine

if TYPE_CHECKING:
    from vllm import RequestOutput

__all__ = ["prompt_log_probs", "score"]


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request. Raises UnsupportedScoreError if that cannot be done correctly."""
    options = parse_options(VllmOptions, request)
    rollouts = request.rollouts
    prepared = prepare_engine(request, options, warm)
    engine, lengths, divisor = prepared.engine, sequence_lengths(rollouts), prepared.divisor
    plan = compose(lengths, options.batch_size, request.variant)
    log_probs = np.full(rollouts.num_tokens, np.nan, dtype=np.float32)
    done = 0
    for rows in plan.batches:
        for temperature in np.unique(divisor[rows]):
            chosen = rows[divisor[rows] == temperature]
            chosen = chosen[lengths[chosen] >= 2]  # a single token has no log-prob
            engine.divide_logits_by(float(temperature))
            outputs = engine.prefill([sequence(rollouts, int(row)) for row in chosen])
            for row, output in zip(chosen.tolist(), outputs, strict=True):
                done += _write(output, rollouts.prompt_offsets, rollouts.response_offsets, row, log_probs)
        report(done)
    return Scored(log_probs=log_probs, fingerprint=prepared.fingerprint(request, options, plan.name))


def _write(
    output: RequestOutput,
    prompt_offsets: NDArray[np.int64],
    response_offsets: NDArray[np.int64],
    row: int,
    into: NDArray[np.float32],
) -> int:
    """Copy the response's log-probs of `row` to their place in `into`; return the number of response tokens."""
    prompt = int(prompt_offsets[row + 1] - prompt_offsets[row])
    start, stop = int(response_offsets[row]), int(response_offsets[row + 1])
    skipped = 1 if prompt == 0 else 0
    into[start + skipped : stop] = prompt_log_probs(output, prompt + skipped)
    return stop - start


def prompt_log_probs(output: RequestOutput, first: int) -> NDArray[np.float64]:
    """Return the log-probs, in nats, of a sequence's tokens from the position `first` ≥ 1 on."""
    flat: Any = output.prompt_logprobs
    at = np.asarray(flat.start_indices[first:], dtype=np.int64)
    return np.asarray(flat.logprobs, dtype=np.float64)[at]
