"""A logits processor for vLLM that forces given tokens, one after another.

vLLM takes raw log-probs before its logits processors, so a forced token's log-prob is that of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

__all__ = ["EXTRA_ARGUMENT", "ForcedTokens"]

EXTRA_ARGUMENT = "foreshock_forced_tokens"
"""Key of `SamplingParams.extra_args` under which a request has the token ids to be forced."""


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM ships no types
    """Leaves only the next forced token of each request that has some; other requests are unchanged."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._requests: dict[int, tuple[list[int], list[int]]] = {}  # by row: the forced tokens, those generated so far

    def is_argmax_invariant(self) -> bool:
        """Return False: the most probable token is replaced."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that enter, leave or move within the batch."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._requests.pop(row, None)
        for row, parameters, _, generated in batch_update.added:
            forced: Any = (parameters.extra_args or {}).get(EXTRA_ARGUMENT)
            if forced:
                self._requests[row] = forced, generated
            else:
                self._requests.pop(row, None)
        for first, second, direction in batch_update.moved:
            moved, replaced = self._requests.pop(first, None), self._requests.pop(second, None)
            if moved is not None:
                self._requests[second] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._requests[first] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set all logits but that of the next forced token to −∞, in the rows that have one."""
        if not self._requests:
            return logits
        rows = list(self._requests)
        next_tokens = [forced[len(generated)] for forced, generated in self._requests.values()]
        at = torch.tensor([rows, next_tokens], device=self._device)
        logits[at[0]] = -torch.inf
        logits[at[0], at[1]] = 0.0
        return logits
