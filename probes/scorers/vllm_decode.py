"""`vllm.decode`: the log-probs of vLLM's decode, with the logged tokens forced one at a time.

The engine computes each token as it did when it sampled: the prompt in a prefill, then one token per step, over its
KV cache. A logits processor forces the logged token (`foreshock_probes.scorers.forced_tokens`); raw log-probs are
taken before it. What remains different from sampling is the composition of the engine's batches.

A temperature is applied as in `vllm.prefill`. `max_tokens` of a request is the length of its response, so rollouts
leave the batch at the same step as when they were sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock_probes.scorers.composition import compose
from foreshock_probes.scorers.request import (
    Report,
    Scored,
    ScoreRequest,
    WarmModel,
    parse_options,
)
from foreshock_probes.scorers.tokens import sequence, sequence_lengths
from foreshock_probes.scorers.vllm_arguments import VllmOptions
from foreshock_probes.scorers.vllm_engine import prepare_engine

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

__all__ = ["score"]


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request. Raises UnsupportedScoreError if that cannot be done correctly."""
    options = parse_options(VllmOptions, request)
    rollouts = request.rollouts
    prepared = prepare_engine(request, options, warm)
    lengths, prompts = sequence_lengths(rollouts), np.diff(rollouts.prompt_offsets)
    # A response without a prompt has no log-prob for its first token, which becomes the prompt.
    prompts = np.maximum(prompts, 1)
    plan = compose(lengths, options.batch_size, request.variant)
    log_probs = np.full(rollouts.num_tokens, np.nan, dtype=np.float32)
    done = 0
    for rows in plan.batches:
        for temperature in np.unique(prepared.divisor[rows]):
            chosen = rows[(prepared.divisor[rows] == temperature) & (lengths[rows] > prompts[rows])]
            tokens = [sequence(rollouts, int(row)) for row in chosen]
            forced = [row[prompt:].tolist() for row, prompt in zip(tokens, prompts[chosen], strict=True)]
            prepared.engine.divide_logits_by(float(temperature))
            outputs = prepared.engine.generate(
                [row[:prompt] for row, prompt in zip(tokens, prompts[chosen], strict=True)],
                [_parameters(each) for each in forced],
            )
            for row, output, expected in zip(chosen.tolist(), outputs, forced, strict=True):
                stop = int(rollouts.response_offsets[row + 1])
                log_probs[stop - len(expected) : stop] = _forced_log_probs(output, expected)
        done += int(np.diff(rollouts.response_offsets)[rows].sum())
        report(done)
    return Scored(log_probs=log_probs, fingerprint=prepared.fingerprint(request, options, plan.name))


def _parameters(forced: list[int]) -> SamplingParams:
    from vllm import SamplingParams

    from foreshock_probes.scorers.forced_tokens import EXTRA_ARGUMENT

    return SamplingParams(
        temperature=0.0,
        logprobs=0,
        flat_logprobs=True,
        max_tokens=len(forced),
        detokenize=False,
        ignore_eos=True,
        extra_args={EXTRA_ARGUMENT: forced},
    )


def _forced_log_probs(output: RequestOutput, forced: list[int]) -> NDArray[np.float64]:
    """Return the log-probs, in nats, of the forced tokens. Raises AssertionError if the engine generated other ones."""
    generated: Any = output.outputs[0]
    if list(generated.token_ids) != forced:
        raise AssertionError("vLLM generated other tokens than the logged ones, although these were forced")
    flat = generated.logprobs
    return np.asarray(flat.logprobs, dtype=np.float64)[np.asarray(flat.start_indices, dtype=np.int64)]
