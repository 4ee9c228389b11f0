"""Exact divergences from vLLM: the two parts of a worker's exact pair.

The target's states and head go to a file. vLLM's process compares them with the logits from which it computes prompt
log-probs. The engine's logits are not recomputed from a copy of the weights, because its kernels, dtypes and rounding
are what is measured. The engine gets one rollout at a time, because its logits are observed
(`observed_logits.PromptLogitsHook`); its option `batch_size` has no effect.

Both parts of a pair have the numerics of their scorers' options. The target uses the batches of its scorer, so that its
log-probs equal the scorer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch
from foreshock.scorers import EXACT_PAIRS
from foreshock_probes.exact_divergence.divergences import ExactDivergences
from foreshock_probes.exact_divergence.logit_sources import LogitSource
from foreshock_probes.exact_divergence.model_distribution import ModelDistribution
from foreshock_probes.exact_divergence.observed_logits import PromptLogitsHook, RolloutReduction
from foreshock_probes.scorers.forward_pass import TokenBatch
from foreshock_probes.scorers.request import (
    Report,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    parse_options,
    write_arrays,
)
from foreshock_probes.scorers.tokens import (
    compose,
    known_states,
    sequence,
    sequence_lengths,
    tokens_of_states,
)
from foreshock_probes.scorers.vllm_engine import VllmEngine, VllmOptions, prepare_engine
from foreshock_probes.scorers.vllm_scorers import prompt_log_probs

# What the measures need of ExactDivergences, besides `top1_flip`.
_COLUMNS = (
    "kl",
    "reverse_kl",
    "tv",
    "target_entropy",
    "behaviour_entropy",
    "target_log_probs",
    "behaviour_log_probs",
)


def run_part(
    request: ScoreRequest, arguments: Mapping[str, str], result: Path, warm: WarmModel, report: Report
) -> None:
    """Do the part of a pair that belongs to the request's scorer, as a task of its engine.

    The target writes the file `states`, the behaviour the divergences [T]; the result of each has its fingerprint.
    Raises UnsupportedScoreError if they cannot be computed correctly.
    """
    states = Path(arguments["states"])
    if request.scorer == EXACT_PAIRS[arguments["pair"]].target:
        write_arrays(result, write_target(request, states, warm, report))
        return
    with _opened(states) as target:
        found, fingerprint = _compare(request, target, warm, report)
        write_arrays(result, fingerprint, **_of_tokens(request.rollouts.num_tokens, found, target.known))


def write_target(request: ScoreRequest, states: Path, warm: WarmModel, report: Report) -> Fingerprint:
    """Write the states before all response tokens, and the head, to the file `states`; return the fingerprint."""
    from foreshock_probes.scorers.torch_forward import TrainerOptions, prepare_forward_pass

    options, rollouts = parse_options(TrainerOptions, request), request.rollouts
    if options.truncation == "apply":
        raise UnsupportedScoreError("exact divergences are those of whole distributions; leave out truncation='apply'")
    forward = prepare_forward_pass(request, options, warm)
    model = ModelDistribution(forward.model, autocast=forward.autocast, head_dtype=forward.head_dtype)
    known = known_states(rollouts)
    size, done = forward.model.get_output_embeddings().weight.shape[1], 0
    hidden = torch.zeros((rollouts.num_tokens, size), dtype=model.states_dtype)
    with torch.no_grad():
        model.check(torch.from_numpy(_beginning(rollouts))[None].to(forward.device))
        for rows in forward.plan.batches:
            batch = TokenBatch(rollouts, rows, options.padding, forward.device)
            found = model.hidden(batch.ids, batch.mask, batch.positions)[:, :-1][batch.needed]
            hidden[torch.from_numpy(tokens_of_states(rollouts, rows, known))] = found.to(model.states_dtype).cpu()
            done += batch.num_response_tokens
            report(done)
    _write_states(states, model.source(hidden), known, forward.distribution.temperature)
    return forward.fingerprint


def _compare(
    request: ScoreRequest, target: _TargetStates, warm: WarmModel, report: Report
) -> tuple[list[ExactDivergences], Fingerprint]:
    """Return the divergences of the target (π) and of vLLM's prefill (μ) at all states, rollout by rollout.

    Raises NotReproducedError if the log-probs that vLLM returns are not those of the observed logits.
    """
    options, rollouts = parse_options(VllmOptions, request), request.rollouts
    if options.tensor_parallel_size != 1:
        raise UnsupportedScoreError(
            f"exact divergences need tensor_parallel_size=1, got {options.tensor_parallel_size}"
        )
    prepared = prepare_engine(request, options, warm)
    engine = prepared.engine
    target.move_to(engine.device)
    found: list[ExactDivergences] = []
    with _observed(engine, prepared.divisor) as reduction:
        for row in range(rollouts.num_rollouts):
            start, stop = _states_of(rollouts, row)
            if stop > start:
                tokens = sequence(rollouts, row)
                prompt = tokens.size - (stop - start)
                engine.divide_logits_by(float(prepared.divisor[row]))
                reduction.start_rollout(target.source(row, start, stop), tokens, prompt)
                (output,) = engine.prefill([tokens])
                found.append(reduction.finish_rollout(row, prompt_log_probs(output, prompt)))
            report(int(rollouts.response_offsets[row + 1]))
    composition = compose(sequence_lengths(rollouts), 1, request.variant).name
    return found, prepared.fingerprint(request, options, composition)


@contextmanager
def _observed(engine: VllmEngine, divisor: NDArray[np.float64]) -> Iterator[RolloutReduction]:
    """Reduce the logits of the engine's prompts within the block, after their division by a temperature."""
    for temperature in np.unique(divisor):
        engine.divide_logits_by(float(temperature))  # the first one other than 1 wraps the logits, below the hook
    reduction = RolloutReduction()
    hook = PromptLogitsHook(reduction.add_logits)
    engine.apply(hook.attach)
    try:
        yield reduction
    finally:
        hook.detach()


def _of_tokens(tokens: int, found: list[ExactDivergences], known: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Return the divergences of all response tokens by name, each [T]; NaN at those without a state."""
    values: dict[str, NDArray[Any]] = {name: np.full(tokens, np.nan, np.float32) for name in _COLUMNS}
    values["top1_flip"] = np.zeros(tokens, np.uint8)
    if found:
        together = ExactDivergences.concatenate(found)
        for name in _COLUMNS:
            values[name][known] = getattr(together, name)
        values["top1_flip"][known] = together.top1_flip
    # Rounding of a float32 reduction may move total variation and entropies slightly out of their range.
    values["tv"] = np.minimum(values["tv"], 1.0)
    for name in ("target_entropy", "behaviour_entropy"):
        values[name] = np.maximum(values[name], 0.0)
    return values


def _beginning(rollouts: RolloutBatch) -> NDArray[np.int64]:
    """Return the first tokens of the first rollout that has any, with which the model is checked."""
    lengths = sequence_lengths(rollouts)
    row = int(np.argmax(lengths > 0)) if lengths.size else 0
    if not lengths.size or not lengths[row]:
        raise UnsupportedScoreError("there are no tokens to compare distributions at")
    tokens: NDArray[np.int64] = sequence(rollouts, row)[:8].astype(np.int64)
    return tokens


def _states_of(rollouts: RolloutBatch, row: int) -> tuple[int, int]:
    """Return the range in [T] of the response tokens of the rollout `row` that have a state before them."""
    start, stop = (int(offset) for offset in rollouts.response_offsets[row : row + 2])
    without_prompt = rollouts.prompt_offsets[row + 1] == rollouts.prompt_offsets[row]
    return (min(start + 1, stop) if without_prompt else start), stop


def _write_states(path: Path, source: LogitSource, known: NDArray[np.bool_], divisor: NDArray[np.float64]) -> None:
    """Write the states [T, H] and the head of `source` to `path`, without the temperature of `source`.

    `known` [T] is False for a response token without a state before it. `divisor` [N] divides the logits of each
    rollout.
    """
    from safetensors.torch import save_file

    tensors = {"hidden": source.hidden, "weight": source.weight}
    if source.bias is not None:
        tensors["bias"] = source.bias
    tensors |= {"known": torch.from_numpy(known), "divisor": torch.from_numpy(divisor)}
    # safetensors cannot store tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, path, metadata={"softcap": json.dumps(source.softcap)})


class _TargetStates:
    """The target's distributions in an open file."""

    def __init__(self, file: Any) -> None:
        self.known: NDArray[np.bool_] = file.get_tensor("known").numpy()
        self._divisor: NDArray[np.float64] = file.get_tensor("divisor").numpy()
        self._softcap: float | None = json.loads(file.metadata()["softcap"])
        self._hidden = file.get_slice("hidden")
        self._weight = file.get_tensor("weight")
        self._bias = file.get_tensor("bias") if "bias" in file.keys() else None  # noqa: SIM118 (not a dict)

    def move_to(self, device: torch.device) -> None:
        """Compute the logits on this device."""
        self._weight = self._weight.to(device)
        self._bias = None if self._bias is None else self._bias.to(device)

    def source(self, row: int, start: int, stop: int) -> LogitSource:
        """Return the logits of the states `start` … `stop`, which belong to the rollout `row`."""
        hidden = self._hidden[start:stop].to(self._weight.device)
        return LogitSource(hidden, self._weight, self._bias, float(self._divisor[row]), self._softcap)


@contextmanager
def _opened(path: Path) -> Iterator[_TargetStates]:
    """Open the file that `_write_states` wrote."""
    from safetensors import safe_open

    with safe_open(path, "pt", device="cpu") as file:
        yield _TargetStates(file)
