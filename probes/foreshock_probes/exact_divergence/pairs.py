"""An exact pair: π is a forward pass of torch, μ is vLLM's prefill, compared at the states before all response tokens.

The two engines run one after another, each in its own process. The first writes its hidden states and its head to a
file; the second computes their logits and reduces them with its own, chunk by chunk as vLLM computes these. All logits
together would not fit into memory: they are V times as many numbers as tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.errors import ForeshockError
from foreshock.fingerprint import Fingerprint
from foreshock.scorers import EXACT_PAIRS
from foreshock_probes.exact_divergence.divergences import NAMES, Divergences, exact_divergences
from foreshock_probes.scorers.forward_pass import TokenBatch, check_logits, head_in, precision, soft_cap, soft_capped
from foreshock_probes.scorers.request import (
    Report,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    parse_options,
    write_arrays,
)
from foreshock_probes.scorers.tokens import compose, sequence, sequence_lengths
from foreshock_probes.scorers.vllm_engine import VllmOptions, prepare_engine
from foreshock_probes.scorers.vllm_scorers import one_by_one, prompt_log_probs

# Rounding of a float32 log-softmax; one bfloat16 digit of a logit is 100 times as large.
_ABSOLUTE, _RELATIVE = 2e-5, 2e-6


class NotReproducedError(ForeshockError):
    """The engine's log-probs are not those of the observed logits, so the divergences would be wrong."""


def run_part(request: ScoreRequest, warm: WarmModel, report: Report) -> None:
    """Do the part of a pair that belongs to the request's scorer, as a task of its engine.

    The target writes the file `states`, the behaviour the divergences [T]; the result of each has its fingerprint.
    Raises UnsupportedScoreError if they cannot be computed correctly.
    """
    states = Path(request.arguments["states"])
    if request.scorer == EXACT_PAIRS[request.arguments["pair"]].target:
        write_arrays(request.result, write_target(request, states, warm, report))
        return
    found, fingerprint = compare(request, states, warm, report)
    write_arrays(request.result, fingerprint, **found)


def write_target(request: ScoreRequest, states: Path, warm: WarmModel, report: Report) -> Fingerprint:
    """Write the states before all response tokens [T, H], and the head, to the file `states`."""
    from safetensors.torch import save_file

    from foreshock_probes.scorers.torch_forward import TrainerOptions, prepare_forward_pass

    options, rollouts = parse_options(TrainerOptions, request), request.rollouts
    if options.truncation == "apply":
        raise UnsupportedScoreError("exact divergences are those of whole distributions; leave out truncation='apply'")
    forward = prepare_forward_pass(request, options, warm)
    head = forward.model.get_output_embeddings()
    dtype = forward.head_dtype or forward.autocast or head.weight.dtype
    hidden = torch.zeros((rollouts.num_tokens, head.weight.shape[1]), dtype=dtype)
    done, lengths = 0, sequence_lengths(rollouts)
    if not lengths.any():
        raise UnsupportedScoreError("there are no tokens to compare distributions at")
    first = torch.from_numpy(sequence(rollouts, int(np.argmax(lengths > 0)))[:8].astype(np.int64))[None]
    with torch.no_grad(), precision(forward.device, forward.autocast):
        with head_in(forward.model, forward.head_dtype):
            check_logits(forward.model, first.to(forward.device))
        for rows in forward.plan.batches:
            batch = TokenBatch(rollouts, rows, options.padding, forward.device)
            found = forward.model.get_decoder()(**batch.inputs).last_hidden_state[:, :-1][batch.needed]
            hidden[torch.from_numpy(batch.tokens)] = found.to(dtype).cpu()
            done += batch.num_response_tokens
            report(done)
    tensors = {
        "hidden": hidden,
        "weight": head.weight.detach().to("cpu", dtype).contiguous(),
        "softcap": torch.tensor(soft_cap(forward.model)),
        "divisor": torch.from_numpy(forward.distribution.temperature),
    }
    if getattr(head, "bias", None) is not None:
        tensors["bias"] = head.bias.detach().to("cpu", dtype)
    save_file(tensors, states)
    return forward.fingerprint


def compare(
    request: ScoreRequest, states: Path, warm: WarmModel, report: Report
) -> tuple[dict[str, NDArray[Any]], Fingerprint]:
    """Return the divergences of the target (π) and of vLLM's prefill (μ) by name, each [T], NaN without a state.

    Raises NotReproducedError if the log-probs that vLLM returns are not those of the observed logits.
    """
    from safetensors.torch import load_file

    options, rollouts = parse_options(VllmOptions, request), request.rollouts
    prepared = prepare_engine(request, options, warm, in_process="exact divergences")
    target = load_file(states)
    target |= {name: target[name].to(prepared.engine.device) for name in ("weight", "bias") if name in target}
    values = {name: np.full(rollouts.num_tokens, np.nan, np.float32) for name in NAMES}
    for row, place, tokens in one_by_one(rollouts, prepared, report):
        of_rollout = {**target, "hidden": target["hidden"][place], "divisor": target["divisor"][row]}
        reduction = Reduction(of_rollout, tokens)
        end = prepared.engine.apply(partial(observe_logits, observe=reduction.add))
        try:
            (output,) = prepared.engine.prefill([tokens])
        finally:
            end()
        for name, found in reduction.finish(row, prompt_log_probs(output, reduction.first)).items():
            values[name][place] = found.numpy()
    composition = compose(sequence_lengths(rollouts), 1, request.variant).name
    return values, prepared.fingerprint(request, options, composition)


class Reduction:
    """Reduces the engine's logits of a sequence to divergences from `target`, whose states precede its last tokens."""

    def __init__(self, target: dict[str, torch.Tensor], tokens: NDArray[np.int32]) -> None:
        self._target, self._tokens, self.first = target, tokens, tokens.size - target["hidden"].shape[0]
        self._seen: list[int] = []
        self._parts: list[Divergences] = []

    def add(self, positions: NDArray[np.int64], logits: torch.Tensor) -> None:
        """Reduce the engine's `logits` [n, V] at `positions` [n] of the sequence; ignore positions of the prompt."""
        needed = np.flatnonzero((positions >= self.first - 1) & (positions < self._tokens.size - 1))
        if needed.size:
            at = positions[needed]
            self._seen += at.tolist()
            ids = torch.from_numpy(self._tokens[at + 1].astype(np.int64)).to(logits.device)
            of_target = target_logits(self._target, torch.from_numpy(at - (self.first - 1)))
            chosen = logits[torch.from_numpy(needed).to(logits.device)]
            self._parts.append(exact_divergences(of_target, chosen, ids))

    def finish(self, row: int, returned: NDArray[np.float64]) -> Divergences:
        """Return the divergences of the rollout `row`, whose response has the log-probs `returned` by the engine.

        Raises NotReproducedError if they differ or if a state was not observed exactly once, in order.
        """
        if self._seen != list(range(self.first - 1, self._tokens.size - 1)):
            raise NotReproducedError(
                f"logits of {len(self._seen)} states of rollout {row} were observed, expected each of its "
                f"{self._tokens.size - self.first} once and in order: this release of vLLM computes prompt log-probs "
                "in another way"
            )
        found = {name: torch.cat([part[name] for part in self._parts]) for name in NAMES}
        check_reproduced(row, found["behaviour_log_probs"].numpy(), returned)
        return found


def target_logits(target: dict[str, torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """Return the target's logits of its `states`, rounded as its model rounds them, then divided by `divisor`."""
    hidden = target["hidden"][states].to(target["weight"].device)
    logits = torch.nn.functional.linear(hidden, target["weight"], target.get("bias"))
    logits = soft_capped(logits, float(target["softcap"]))
    return logits if target["divisor"] == 1.0 else logits.float() / float(target["divisor"])


def check_reproduced(row: int, observed: NDArray[np.float64], returned: NDArray[np.float64]) -> None:
    """Raise NotReproducedError unless the log-probs `observed` equal those `returned` by the engine, up to rounding."""
    same = np.isclose(observed, returned, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True)
    if not same.all():
        first = int(np.flatnonzero(~same)[0])
        raise NotReproducedError(
            f"token {first} of rollout {row} has the log-prob {observed[first]:.6f} by the observed logits, but vLLM "
            f"returned {returned[first]:.6f}; {int((~same).sum())} of {same.size} tokens differ: this release of vLLM "
            "computes its log-probs from other logits"
        )


def observe_logits(model: Any, observe: Callable[[NDArray[np.int64], torch.Tensor], None]) -> Callable[[], None]:
    """Call `observe(positions [n], logits [n, V])` for each chunk of prompt states of a model of vLLM; return the end.

    vLLM has no interface for these logits: prompt log-probs over the vocabulary are Python objects, and hidden states
    are available only to connectors for drafters. But all of its model runners call the model and then
    `compute_logits`, on a slice of the model's output for prompt log-probs, on a copy of some rows for the sampler. A
    slice shares its memory with the output, so its offset gives the rows, and the model's argument `positions` gives
    their positions. Correct only for one sequence at a time; the caller must check that each position came once.
    """
    plain, newest = model.compute_logits, list[tuple[torch.Tensor, torch.Tensor]]()

    def forwarded(model: Any, arguments: tuple[Any, ...], named: dict[str, Any], states: Any) -> None:
        positions = named.get("positions")
        newest.clear()
        if isinstance(states, torch.Tensor) and isinstance(positions, torch.Tensor) and positions.ndim == 1:
            newest.append((states, positions))

    def compute_logits(hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        logits = plain(hidden, *arguments, **named)
        for states, positions in newest:
            if logits is None or hidden.untyped_storage().data_ptr() != states.untyped_storage().data_ptr():
                continue
            first = (hidden.storage_offset() - states.storage_offset()) // states.stride(0)
            observe(positions[first : first + hidden.shape[0]].cpu().numpy().astype(np.int64), logits)
        return logits

    def end() -> None:
        model.compute_logits = plain
        handle.remove()

    model.compute_logits = compute_logits
    handle = model.register_forward_hook(forwarded, with_kwargs=True)
    return end
