"""`vllm.prefill` and `vllm.decode`: the log-probs of vLLM's own kernels, dtype and head.

`vllm.prefill` passes prompt and response as one prompt, without the state of sampling. Compared with `rollout`, it
shows the effect of decoding, caches and stale weights; compared with `torch.trainer`, that of engine against trainer.
`vllm.decode` computes each token as the engine did when it sampled: the prompt in a prefill, then one token per step
over its KV cache. A logits processor forces the logged token (`vllm_plugins`); raw log-probs are taken before it. Only
the composition of the engine's batches still differs from sampling.

vLLM's prompt log-probs are always raw; a temperature is applied to the logits that the model returns. A LoRA adapter is
loaded by vLLM itself. Multimodal prompts, and log-probs under top-p, top-k or min-p are not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, WarmModel, parse_options
from foreshock_probes.scorers.tokens import compose, score_by_temperature, sequence, sequence_lengths
from foreshock_probes.scorers.vllm_engine import Prepared, VllmEngine, VllmOptions, prepare_engine

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def score_prefill(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `vllm.prefill`. Raises UnsupportedScoreError if that cannot be done correctly."""
    # A sequence of one token has no log-prob.
    return _score(request, warm, report, _prefilled, sequence_lengths(request.rollouts) >= 2)


def score_decode(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `vllm.decode`. Raises UnsupportedScoreError if that cannot be done correctly."""
    # The first token of a response without a prompt has no log-prob; it becomes the prompt.
    prompts = np.maximum(np.diff(request.rollouts.prompt_offsets), 1)
    return _score(request, warm, report, _decoded, sequence_lengths(request.rollouts) > prompts)


def _score(
    request: ScoreRequest,
    warm: WarmModel,
    report: Report,
    log_probs_of: Callable[[VllmEngine, list[NDArray[np.int32]], list[int]], Iterable[NDArray[np.float64]]],
    scored: NDArray[np.bool_],
) -> Scored:
    """Score the request batch by batch, rows of one temperature together; `scored` [N]: True for rows to submit."""
    options, rollouts = parse_options(VllmOptions, request), request.rollouts
    prepared = prepare_engine(request, options, warm)
    plan = compose(sequence_lengths(rollouts), options.batch_size, request.variant)

    def ask(temperature: float, tokens: list[NDArray[np.int32]], firsts: list[int]) -> Iterable[NDArray[np.float64]]:
        prepared.engine.divide_logits_by(temperature)
        return log_probs_of(prepared.engine, tokens, firsts)

    log_probs = score_by_temperature(rollouts, plan.batches, prepared.divisor, scored, ask, report)
    return Scored(log_probs=log_probs, fingerprint=prepared.fingerprint(request, options, plan.name))


def _prefilled(engine: VllmEngine, tokens: list[NDArray[np.int32]], firsts: list[int]) -> Iterator[NDArray[np.float64]]:
    return (prompt_log_probs(output, first) for output, first in zip(engine.prefill(tokens), firsts, strict=True))


def prompt_log_probs(output: RequestOutput, first: int) -> NDArray[np.float64]:
    """Return the log-probs, in nats, of a sequence's tokens from the position `first` ≥ 1 on."""
    flat: Any = output.prompt_logprobs
    at = np.asarray(flat.start_indices[first:], dtype=np.int64)
    return np.asarray(flat.logprobs, dtype=np.float64)[at]


def one_by_one(
    rollouts: RolloutBatch, prepared: Prepared, report: Report
) -> Iterator[tuple[int, slice, NDArray[np.int32]]]:
    """Yield each rollout with a state: its row, the place in [T] of the tokens that have one, and its whole sequence.

    The engine then divides logits by the rollout's temperature.
    """
    for row in range(rollouts.num_rollouts):
        start, stop = rollouts.response_offsets[row : row + 2].tolist()
        tokens = sequence(rollouts, row)
        start += tokens.size == stop - start  # the first token of a rollout without a prompt has no state before it
        if stop > start:
            prepared.engine.divide_logits_by(float(prepared.divisor[row]))
            yield row, slice(start, stop), tokens
        report(stop)


def _decoded(engine: VllmEngine, tokens: list[NDArray[np.int32]], firsts: list[int]) -> Iterator[NDArray[np.float64]]:
    forced = [row[first:].tolist() for row, first in zip(tokens, firsts, strict=True)]
    prompts = [row[:first] for row, first in zip(tokens, firsts, strict=True)]
    outputs = engine.generate(prompts, [_parameters(each) for each in forced])
    return (_forced_log_probs(output, each) for output, each in zip(outputs, forced, strict=True))


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
