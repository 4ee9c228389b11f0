"""Plugins of every vLLM engine: methods of its worker processes, and a logits processor that forces given tokens.

With tensor parallelism the model is in vLLM's own processes, which can be reached only by the name of a method. vLLM
takes raw log-probs before its logits processors, so a forced token's log-prob is that of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate


class WorkerExtension:
    """A mixin of vLLM's worker class, which has `get_model`. vLLM requires names that its class does not use."""

    def foreshock_attention_backends(self) -> list[str]:
        """Return the names of the attention backends of the model's layers, sorted."""
        backends = (getattr(module, "attn_backend", None) for module in self._foreshock_model().modules())
        return sorted({backend.get_name() for backend in backends if backend is not None})

    def foreshock_divide_logits_by(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on, in float32."""
        model = self._foreshock_model()
        if not hasattr(model, "foreshock_divisor"):
            plain = model.compute_logits

            def compute_logits(*arguments: Any, **named: Any) -> Any:
                logits = plain(*arguments, **named)
                # In a tensor-parallel group, logits may be None in all workers but one.
                divisor = model.foreshock_divisor
                return logits if divisor == 1.0 or logits is None else logits.float() / divisor

            model.compute_logits = compute_logits
        model.foreshock_divisor = temperature

    def _foreshock_model(self) -> Any:
        return self.get_model()  # type: ignore[attr-defined]  # of the class that this one is mixed into


EXTRA_ARGUMENT = "foreshock_forced_tokens"
"""Key of `SamplingParams.extra_args` under which a request has the token ids to be forced."""


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM ships no types
    """Leaves only the next forced token of each request that has forced tokens; other requests are unchanged."""

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
        """In rows with a next forced token, set all other logits to −∞."""
        if not self._requests:
            return logits
        rows = list(self._requests)
        next_tokens = [forced[len(generated)] for forced, generated in self._requests.values()]
        at = torch.tensor([rows, next_tokens], device=self._device)
        logits[at[0]] = -torch.inf
        logits[at[0], at[1]] = 0.0
        return logits
