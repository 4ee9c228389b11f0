"""The logits of vLLM's prompts, observed and reduced: the engine's part of an exact divergence.

vLLM's model computes the logits of prompt states in chunks; each chunk is reduced against the target's states and
freed. After each rollout the log-probs that vLLM returned are compared with those of the observed logits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.errors import ForeshockError
from foreshock_probes.exact_divergence.divergences import ExactDivergences, exact_divergences
from foreshock_probes.exact_divergence.logit_sources import GivenLogits, LogitSource

Observe = Callable[[NDArray[np.int64], torch.Tensor], None]

# Rounding of a float32 log-softmax; one bfloat16 digit of a logit is 100 times as large.
_ABSOLUTE, _RELATIVE = 2e-5, 2e-6


class NotReproducedError(ForeshockError):
    """The engine's log-probs are not those of the observed logits, so the divergences would be wrong."""


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


class RolloutReduction:
    """Reduces the engine's logits, chunk by chunk, to divergences from a target; one rollout after another."""

    def __init__(self) -> None:
        self._target: LogitSource | None = None

    def start_rollout(self, target: LogitSource, tokens: NDArray[np.int32], prompt: int) -> None:
        """Start the rollout `tokens`; `target` has a state for each token after the first `prompt` ones."""
        self._target, self._tokens, self._prompt = target, tokens, prompt
        self._observed: list[int] = []
        self._parts: list[ExactDivergences] = []

    def add_logits(self, positions: NDArray[np.int64], logits: torch.Tensor) -> None:
        """Reduce the engine's `logits` [n, V] at `positions` [n] of the sequence; ignore positions of the prompt."""
        if self._target is None:
            return
        needed = (positions >= self._prompt - 1) & (positions < self._tokens.size - 1)
        at = positions[needed]
        if not at.size:
            return
        self._observed += at.tolist()
        states = torch.from_numpy(at - (self._prompt - 1)).to(self._target.hidden.device)
        chosen = torch.from_numpy(np.flatnonzero(needed)).to(logits.device)
        self._parts.append(
            exact_divergences(
                dataclasses.replace(self._target, hidden=self._target.hidden[states]),
                GivenLogits(logits[chosen]),
                token_ids=self._tokens[at + 1],
            )
        )

    def finish_rollout(self, row: int, returned: NDArray[np.float64]) -> ExactDivergences:
        """Return the divergences of the rollout `row`, whose response has the log-probs `returned` by the engine.

        Raises NotReproducedError if they differ or if a state was not observed exactly once, in order.
        """
        self._target = None
        expected = range(self._prompt - 1, self._tokens.size - 1)
        if self._observed != list(expected):
            raise NotReproducedError(
                f"logits of {len(self._observed)} states of rollout {row} were observed, expected each of its "
                f"{len(expected)} once and in order: this release of vLLM computes prompt log-probs in another way"
            )
        found = ExactDivergences.concatenate(self._parts)
        assert found.behaviour_log_probs is not None
        check_reproduced(row, found.behaviour_log_probs, returned)
        return found


class PromptLogitsHook:
    """Calls `observe(positions [n], logits [n, V])` for each chunk of prompt states, before the logits are modified.

    vLLM has no interface for these logits: prompt log-probs over the vocabulary are Python objects, and hidden states
    are available only to connectors for drafters. But all of its model runners call the model and then
    `compute_logits`, on a slice of the model's output for prompt log-probs, on a copy of some rows for the sampler. A
    slice shares its memory with the output, so its offset gives the rows, and the model's argument `positions` gives
    their positions.

    Correct only for one sequence at a time; the caller must check that each position came once.
    """

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._states: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._detach: Callable[[], None] = lambda: None

    def attach(self, model: Any) -> None:
        """Install the hook on `model`, a model of vLLM."""
        plain = model.compute_logits

        def compute_logits(hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            logits = plain(hidden, *arguments, **named)
            self._computed(hidden, logits)
            return logits

        model.compute_logits = compute_logits
        handle = model.register_forward_hook(self._forwarded, with_kwargs=True)

        def detach() -> None:
            model.compute_logits = plain
            handle.remove()

        self._detach = detach

    def detach(self) -> None:
        """Remove the hook; the model's logits must not have been wrapped again after `attach`."""
        self._detach()
        self._detach = lambda: None

    def _forwarded(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any], states: Any) -> None:
        positions = named.get("positions")
        known = isinstance(states, torch.Tensor) and isinstance(positions, torch.Tensor) and positions.ndim == 1
        self._states, self._positions = (states, positions) if known else (None, None)

    def _computed(self, hidden: torch.Tensor, logits: torch.Tensor | None) -> None:
        states, positions = self._states, self._positions
        if states is None or positions is None or logits is None or logits.shape[0] != hidden.shape[0]:
            return
        if hidden.untyped_storage().data_ptr() != states.untyped_storage().data_ptr():
            return
        first = (hidden.storage_offset() - states.storage_offset()) // states.stride(0)
        self._observe(positions[first : first + hidden.shape[0]].cpu().numpy().astype(np.int64), logits)
