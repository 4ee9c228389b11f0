"""The two parts of an exact pair in a worker: the target's states in torch's process, the comparison in vLLM's.

Both parts use the models that the scorers keep loaded, with the numerics of their options. The target's batches are
those of its scorer, so that its log-probs are the scorer's. The engine gets one rollout at a time, because its logits
are observed (`observed_logits.PromptLogitsHook`); its option `batch_size` has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import ExactBatch, RolloutBatch, encode_exact
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
    write_result,
)
from foreshock_probes.scorers.tokens import compose, known_states, sequence, sequence_lengths, tokens_of_states

if TYPE_CHECKING:
    from foreshock_probes.scorers.vllm_engine import VllmEngine

__all__ = ["compare_with_states", "part_of_pair", "run_part", "write_target"]

# The columns of ExactBatch that ExactDivergences has under the same name.
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
    """Do one part of a pair as a task of an engine; the divergences are written to the file `result`."""
    divergences = part_of_pair(arguments["pair"], request, Path(arguments["states"]), warm, report)
    if divergences is not None:
        write_result(encode_exact(divergences), result)


def part_of_pair(pair: str, request: ScoreRequest, states: Path, warm: WarmModel, report: Report) -> ExactBatch | None:
    """Do the part of the pair that belongs to the request's scorer; the target's has no result but the file `states`.

    Raises UnsupportedScoreError if the pair is unknown, or if its divergences cannot be computed correctly.
    """
    if pair not in EXACT_PAIRS:
        raise UnsupportedScoreError(f"unknown exact pair {pair!r}; pairs: {', '.join(EXACT_PAIRS)}")
    if request.scorer == EXACT_PAIRS[pair].target:
        write_target(request, states, warm, report)
        return None
    return compare_with_states(request, states, warm, report)


def write_target(request: ScoreRequest, states: Path, warm: WarmModel, report: Report) -> None:
    """Write the states before all response tokens, and the head, to the file `states`."""
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
    _write_states(states, model.source(hidden), known, forward.distribution.temperature, forward.fingerprint)


def compare_with_states(request: ScoreRequest, states: Path, warm: WarmModel, report: Report) -> ExactBatch:
    """Return the divergences of the target in the file `states` (π) and of vLLM's prefill (μ) at all states.

    Raises NotReproducedError if the log-probs that vLLM returns are not those of the observed logits.
    """
    from foreshock_probes.scorers.vllm_engine import VllmOptions, prepare_engine
    from foreshock_probes.scorers.vllm_scorers import prompt_log_probs

    options, rollouts = parse_options(VllmOptions, request), request.rollouts
    if options.tensor_parallel_size != 1:
        raise UnsupportedScoreError(
            f"exact divergences need tensor_parallel_size=1, got {options.tensor_parallel_size}"
        )
    prepared = prepare_engine(request, options, warm)
    engine = prepared.engine
    found: list[ExactDivergences] = []
    with _open_states(states, engine.device) as target, _observed(engine, prepared.divisor) as observed:
        for row in range(rollouts.num_rollouts):
            start, stop = _states_of(rollouts, row)
            if stop > start:
                tokens = sequence(rollouts, row)
                prompt = tokens.size - (stop - start)
                engine.divide_logits_by(float(prepared.divisor[row]))
                observed.start_rollout(target.source(row, start, stop), tokens, prompt)
                (output,) = engine.prefill([tokens])
                found.append(observed.finish_rollout(row, prompt_log_probs(output, prompt)))
            report(int(rollouts.response_offsets[row + 1]))
        composition = compose(sequence_lengths(rollouts), 1, request.variant).name
        return _batch(rollouts, found, target, prepared.fingerprint(request, options, composition))


class _ObservedEngine:
    """Reduces the logits of an engine's prompts, one rollout at a time, against the target's states."""

    def __init__(self) -> None:
        self._reduction: RolloutReduction | None = None

    def start_rollout(self, target: LogitSource, tokens: NDArray[np.int32], prompt: int) -> None:
        """Start the rollout `tokens`; `target` has a state for each of them after the first `prompt` ones."""
        self._reduction = RolloutReduction(target, ())
        self._reduction.start_rollout(tokens, 0, prompt)

    def finish_rollout(self, row: int, returned: NDArray[np.float64]) -> ExactDivergences:
        """Return the divergences of the rollout `row`. Raises NotReproducedError."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            raise AssertionError("finish_rollout needs a started rollout")
        reduction.finish_rollout(row, returned)
        return reduction.divergences()

    def add_logits(self, positions: NDArray[np.int64], logits: torch.Tensor) -> None:
        """Reduce logits [n, V]; called by the hook."""
        if self._reduction is not None:
            self._reduction.add_logits(positions, logits)


@contextmanager
def _observed(engine: VllmEngine, divisor: NDArray[np.float64]) -> Iterator[_ObservedEngine]:
    """Observe the engine's logits within the block, after their division by a temperature."""
    for temperature in np.unique(divisor):
        engine.divide_logits_by(float(temperature))  # the first other than 1 wraps the logits, below the hook
    observed = _ObservedEngine()
    hook = PromptLogitsHook(observed.add_logits)
    engine.apply(hook.attach)
    try:
        yield observed
    finally:
        hook.detach()


def _batch(
    rollouts: RolloutBatch, found: list[ExactDivergences], target: _TargetStates, fingerprint: Fingerprint
) -> ExactBatch:
    """Return the divergences of all rollouts; NaN at response tokens without a state."""
    values = {name: np.full(rollouts.num_tokens, np.nan, np.float32) for name in _COLUMNS}
    flips = np.zeros(rollouts.num_tokens, np.uint8)
    if found:
        together = ExactDivergences.concatenate(found)
        for name in _COLUMNS:
            values[name][target.known] = getattr(together, name)
        flips[target.known] = together.top1_flip
    # The total variation and entropies of a float32 reduction may exceed their range by its rounding.
    values["tv"] = np.minimum(values["tv"], 1.0)
    for name in ("target_entropy", "behaviour_entropy"):
        values[name] = np.maximum(values[name], 0.0)
    return ExactBatch(
        sample_ids=rollouts.sample_ids,
        offsets=rollouts.response_offsets,
        top1_flip=flips,
        target_fingerprint=target.fingerprint,
        behaviour_fingerprint=fingerprint,
        **values,
    )


def _beginning(rollouts: RolloutBatch) -> NDArray[np.int64]:
    """Return the first tokens of the first rollout that has any, to check the model with."""
    lengths = sequence_lengths(rollouts)
    row = int(np.argmax(lengths > 0)) if lengths.size else 0
    if not lengths.size or not lengths[row]:
        raise UnsupportedScoreError("there are no tokens to compare distributions at")
    tokens: NDArray[np.int64] = sequence(rollouts, row)[:8].astype(np.int64)
    return tokens


def _states_of(rollouts: RolloutBatch, row: int) -> tuple[int, int]:
    """Return the response tokens of the rollout `row` that have a state before them, as a range of [T]."""
    start, stop = (int(offset) for offset in rollouts.response_offsets[row : row + 2])
    without_prompt = rollouts.prompt_offsets[row + 1] == rollouts.prompt_offsets[row]
    return (min(start + 1, stop) if without_prompt else start), stop


_FINGERPRINT, _SOFTCAP = "fingerprint", "softcap"


def _write_states(
    path: Path, source: LogitSource, known: NDArray[np.bool_], divisor: NDArray[np.float64], fingerprint: Fingerprint
) -> None:
    """Write the states [T, H] and the head of `source` to `path`.

    `known` [T] is False where a response token has no state before it. `divisor` [N] divides the logits of each
    rollout; the source's own temperature must be 1.
    """
    from safetensors.torch import save_file

    if source.temperature != 1.0 or source.logits_dtype is not None:
        raise ValueError("the states of a source with a temperature or a logits_dtype of its own cannot be written")
    tensors = {"hidden": source.hidden, "weight": source.weight}
    if source.bias is not None:
        tensors["bias"] = source.bias
    tensors |= {"known": torch.from_numpy(known), "divisor": torch.from_numpy(divisor)}
    # safetensors cannot store tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {_FINGERPRINT: fingerprint.to_json(), _SOFTCAP: json.dumps(source.softcap)}
    save_file(copies, path, metadata=metadata)


class _TargetStates:
    """The target's distributions in an open file, on `device`."""

    def __init__(self, file: Any, device: torch.device) -> None:
        metadata = file.metadata()
        self.fingerprint = Fingerprint.from_json(metadata[_FINGERPRINT])
        self.known: NDArray[np.bool_] = file.get_tensor("known").numpy()
        self._softcap: float | None = json.loads(metadata[_SOFTCAP])
        self._divisor: NDArray[np.float64] = file.get_tensor("divisor").numpy()
        self._hidden = file.get_slice("hidden")
        self._weight = file.get_tensor("weight").to(device)
        self._bias = file.get_tensor("bias").to(device) if "bias" in file.keys() else None  # noqa: SIM118 (not a dict)
        self._device = device

    @property
    def vocabulary(self) -> int:
        """The size of the target's vocabulary."""
        return int(self._weight.shape[0])

    def source(self, row: int, start: int, stop: int) -> LogitSource:
        """Return the logits of the states `start` … `stop`, which belong to the rollout `row`."""
        hidden = self._hidden[start:stop].to(self._device)
        return LogitSource(hidden, self._weight, self._bias, float(self._divisor[row]), self._softcap)


@contextmanager
def _open_states(path: Path, device: torch.device) -> Iterator[_TargetStates]:
    """Open the file that `_write_states` wrote."""
    from safetensors import safe_open

    with safe_open(path, "pt", device="cpu") as file:
        yield _TargetStates(file, device)
