"""`vllm.prefill` and `vllm.decode`: the log-probs of vLLM's own kernels, dtype and head.

`vllm.prefill` passes prompt and response as one prompt, without the state of sampling: compared with `rollout` it shows
the effect of decoding, caches and stale weights, compared with `torch.trainer` that of engine against trainer.
`vllm.decode` computes each token as the engine did when it sampled: the prompt in a prefill, then one token per step
over its KV cache. A logits processor forces the logged token (`vllm_plugins`); raw log-probs are taken before it. What
remains different from sampling is the composition of the engine's batches.

vLLM's prompt log-probs are always raw; a temperature is applied to the logits that the model returns. Multimodal
prompts, LoRA adapters, and log-probs under top-p, top-k or min-p are not covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, WarmModel, parse_options
from foreshock_probes.scorers.tokens import compose, sequence, sequence_lengths
from foreshock_probes.scorers.vllm_engine import VllmOptions, prepare_engine

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def score_prefill(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `vllm.prefill`. Raises UnsupportedScoreError if that cannot be done correctly."""
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


def score_decode(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `vllm.decode`. Raises UnsupportedScoreError if that cannot be done correctly."""
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

    from foreshock_probes.scorers.vllm_plugins import EXTRA_ARGUMENT

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
