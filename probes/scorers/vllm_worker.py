"""Methods that every worker process of a vLLM engine gets: `worker_extension_cls`.

With tensor parallelism the model is in processes of vLLM's own, which are reached by the name of a method only.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Mixed into vLLM's worker class, which has `get_model`. vLLM requires that no name is in use there."""

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
                # Only one worker of a tensor-parallel group may get the logits.
                divisor = model.foreshock_divisor
                return logits if divisor == 1.0 or logits is None else logits.float() / divisor

            model.compute_logits = compute_logits
        model.foreshock_divisor = temperature

    def _foreshock_model(self) -> Any:
        return self.get_model()  # type: ignore[attr-defined]  # of the class that this one is mixed into
