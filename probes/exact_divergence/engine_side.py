"""The engine's process of `EngineDistribution`: `python -m probes.exact_divergence.engine_side FOLDER`.

vLLM's prefill is given one rollout at a time. As its model computes the logits of prompt states, chunk by chunk, they
are reduced against the target's states and dropped: no more than one chunk of logits is ever there. Then the log-probs
that vLLM returned must be those of the logits that were seen.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.errors import ForeshockError
from foreshock.rollouts import decode_rollouts
from probes.engines.environment import hold_this_process
from probes.exact_divergence.handover import Handover, Job, Refusal
from probes.exact_divergence.prompt_logits import PromptLogits
from probes.exact_divergence.result import ExactDivergences
from probes.exact_divergence.sources import GivenLogits, LogitSource
from probes.exact_divergence.streaming import exact_divergences
from probes.scorers.request import UnsupportedScoreError
from probes.scorers.tokens import check_tokens, sequence, sequence_lengths
from probes.scorers.vllm_prefill import PrefillEngine, engine_arguments, prompt_log_probs

__all__ = ["NotReproducedError", "Watching", "check_reproduced", "main"]

# What float32 log-softmax loses; one bfloat16 digit of a logit is a hundred times as much.
_ABSOLUTE, _RELATIVE = 2e-5, 2e-6

# Here and not in main(): processes that an engine spawns import this module too, and are to be held as well.
hold_this_process()


class NotReproducedError(ForeshockError):
    """The engine's own log-probs are not those of the logits that were seen: nothing of them can be believed."""


def main() -> int:
    """Do the job in the folder; refusals are written there, anything else that goes wrong is a traceback."""
    handover = Handover(Path(sys.argv[1]))
    try:
        handover.write_found(_found(handover))
    except UnsupportedScoreError as error:
        handover.refusal.write_text(Refusal(kind="unsupported", reason=str(error)).model_dump_json(), "utf-8")
    except NotReproducedError as error:
        handover.refusal.write_text(Refusal(kind="not_reproduced", reason=str(error)).model_dump_json(), "utf-8")
    return 0


def check_reproduced(row: int, seen: NDArray[np.float64], returned: NDArray[np.float64]) -> None:
    """Raise NotReproducedError unless the log-probs `seen` are those that the engine `returned`, but for rounding."""
    same = np.isclose(seen, returned, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True)
    if not same.all():
        worst = int(np.flatnonzero(~same)[0])
        raise NotReproducedError(
            f"logits that vLLM was seen making give token {worst} of rollout {row} the log-prob {seen[worst]:.6f}, "
            f"but it returned {returned[worst]:.6f}; {int((~same).sum())} of {same.size} tokens differ: these are not "
            "the logits behind its log-probs"
        )


def _found(handover: Handover) -> ExactDivergences:
    job = Job.model_validate_json(handover.job.read_bytes())
    with handover.rollouts.open("rb") as file:
        rollouts = decode_rollouts(file)
    check_tokens(rollouts, job.weights_folder)
    longest = int(sequence_lengths(rollouts).max(initial=1))
    engine = PrefillEngine(engine_arguments(job.weights_folder, job.options, longest))
    engine.divide_logits_by(job.options.temperature or 1.0)
    target = handover.read_target(engine.device)
    watching = Watching(target, job.top_ks)
    engine.apply(PromptLogits(watching.take).attach)
    for row in range(rollouts.num_rollouts):
        first, stop = (int(offset) for offset in rollouts.response_offsets[row : row + 2])
        if stop > first:
            tokens = sequence(rollouts, row)
            watching.begin(tokens, first, tokens.size - (stop - first))
            (output,) = engine.prefill([tokens])
            watching.end(row, prompt_log_probs(output, tokens.size - (stop - first)))
    return watching.found()


class Watching:
    """Reduces the logits of one rollout after the other."""

    def __init__(self, target: LogitSource, top_ks: tuple[int, ...]) -> None:
        self._target = target
        self._top_ks = top_ks
        self._rollouts: list[ExactDivergences] = []

    def begin(self, tokens: NDArray[np.int32], first: int, prompt: int) -> None:
        """A rollout of `tokens`, its prompt and all, whose response begins at the target's state `first`."""
        self._tokens, self._first, self._prompt = tokens, first, prompt
        self._seen: list[int] = []
        self._parts: list[ExactDivergences] = []

    def take(self, positions: NDArray[np.int64], logits: torch.Tensor) -> None:
        """The engine made `logits` [n, V] at `positions` [n] of the sequence."""
        needed = (positions >= self._prompt - 1) & (positions < self._tokens.size - 1)
        at = positions[needed]
        if not at.size:
            return
        self._seen += at.tolist()
        states = torch.from_numpy(at - (self._prompt - 1) + self._first).to(self._target.device)
        chosen = torch.from_numpy(np.flatnonzero(needed)).to(logits.device)
        self._parts.append(
            exact_divergences(
                dataclasses.replace(self._target, hidden=self._target.hidden[states]),
                GivenLogits(logits[chosen]),
                token_ids=self._tokens[at + 1],
                top_ks=self._top_ks,
            )
        )

    def end(self, row: int, returned: NDArray[np.float64]) -> None:
        """The engine has done the rollout `row`, and `returned` these log-probs of its response."""
        wanted = range(self._prompt - 1, self._tokens.size - 1)
        if self._seen != list(wanted):
            raise NotReproducedError(
                f"vLLM made the logits of {len(self._seen)} states of rollout {row} where they could be seen, not of "
                f"its {len(wanted)} one after the other: this release computes prompt log-probs in another way"
            )
        found = ExactDivergences.concatenate(self._parts)
        if found.behaviour_log_probs is None:
            raise AssertionError("token ids were handed in, so there are log-probs")
        check_reproduced(row, found.behaviour_log_probs, returned)
        self._rollouts.append(found)

    def found(self) -> ExactDivergences:
        """Of all rollouts, in their order."""
        return ExactDivergences.concatenate(self._rollouts)


if __name__ == "__main__":
    sys.exit(main())
