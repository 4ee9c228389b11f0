"""Sees the logits from which vLLM computes prompt log-probs, with the positions that they belong to.

vLLM's interface has no such thing: prompt log-probs of the whole vocabulary come as Python objects and without what the
tail lost, hidden states only through a connector for drafters. What all its model runners do, though, is to
call the model, and then `compute_logits` on rows of what it returned: on a slice of it for prompt log-probs, on a copy
of some rows for the sampler. A slice says where it was cut, and the model is told the positions of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["PromptLogits"]

Take = Callable[[NDArray[np.int64], torch.Tensor], None]


class PromptLogits:
    """Calls `take(positions [n], logits [n, V])` for each chunk of prompt states, before anything changes the logits.

    Right only while the engine has one sequence at a time; who uses it has to check that each position came once.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._states: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None

    def attach(self, model: Any) -> None:
        """Watch `model`, a model of vLLM, from now on."""
        plain = model.compute_logits

        def compute_logits(hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            logits = plain(hidden, *arguments, **named)
            self._made(hidden, logits)
            return logits

        model.compute_logits = compute_logits
        model.register_forward_hook(self._forwarded, with_kwargs=True)

    def _forwarded(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any], states: Any) -> None:
        positions = named.get("positions")
        known = isinstance(states, torch.Tensor) and isinstance(positions, torch.Tensor) and positions.ndim == 1
        self._states, self._positions = (states, positions) if known else (None, None)

    def _made(self, hidden: torch.Tensor, logits: torch.Tensor | None) -> None:
        states, positions = self._states, self._positions
        if states is None or positions is None or logits is None or logits.shape[0] != hidden.shape[0]:
            return
        if hidden.untyped_storage().data_ptr() != states.untyped_storage().data_ptr():
            return
        first = (hidden.storage_offset() - states.storage_offset()) // states.stride(0)
        self._take(positions[first : first + hidden.shape[0]].cpu().numpy().astype(np.int64), logits)
