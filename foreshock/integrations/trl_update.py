"""How far an optimizer step moved the policy (`update_k3`): some of its rollouts are scored once more after it.

They are scored by the trainer's own function, with the arguments of its call before the update. The control loop of the
advice holds this at a set point; without it, a rate that is too high is seen only once the reward falls.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from foreshock.client.reporting import LogOnce

__all__ = ["MOST_ROLLOUTS", "Update"]

MOST_ROLLOUTS: Final = 32
LEAST_ROLLOUTS: Final = 16
ONE_IN: Final = 32
"""One rollout in 32 of the main process's is scored again, but at least 16 and at most 32. 16 of 512 rollouts of 24
tokens took 2.6 % of the CPU time of a step of a tiny model with vLLM on two cores, and 32 took 4.6 %; `update_k3` of
the two differed by 0.3 to 6 %."""

_HARMLESS: Final = ("batch_size", "compute_entropy", "compute_aux_loss")
"""Arguments of a forward pass that change no log-prob."""

_SHARDED: Final = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


@dataclass(frozen=True, slots=True)
class _Scored:
    """Rows of a call before the update: its arguments, and the log-probs that it returned."""

    ids: Any
    attention: Any
    responses: int
    log_probs: Any


class Update:
    """Keeps the newest scored rollouts of the main process, and scores them again."""

    def __init__(self, trainer: Any, log: LogOnce, rollouts: int) -> None:
        self._trainer = trainer
        self._log = log
        self._rollouts = rollouts
        self._scored: _Scored | None = None
        self._measures = False

    def note_loss(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], log_probs: Any) -> None:
        """Keep rows of the loss's first forward pass, unless TRL has scored the rollouts before: it need not."""
        if self._scored is None and not self._measures and self._trainer.model.training:
            self.note(arguments, keywords, log_probs.detach())

    def note(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], log_probs: Any) -> None:
        """Keep rows of a call of `_get_per_token_logps_and_entropies` before the update."""
        accelerator = self._trainer.accelerator
        if self._rollouts < 1 or not accelerator.is_main_process:
            return
        named = dict(zip(("model", "ids", "attention", "responses"), arguments, strict=False))
        others = [name for name, value in keywords.items() if name not in _HARMLESS and value is not None]
        kind = str(accelerator.distributed_type).rpartition(".")[2]
        if len(named) < 4 or others or (kind in _SHARDED and accelerator.num_processes > 1):
            reason = f"of {', '.join(others)}" if others else f"the weights are sharded ({kind})"
            self._log.warning("update", f"update_k3 is not measured: {reason}")
            return
        size = len(named["ids"])
        chosen = min(self._rollouts, max(LEAST_ROLLOUTS, size // ONE_IN), size)
        every = math.ceil(size / chosen)
        rows = slice(None, None, every)
        self._scored = _Scored(named["ids"][rows], named["attention"][rows], named["responses"], log_probs[rows])

    def measure(self) -> float | None:
        """Return k3 of the policy now against that of the kept log-probs, in nats per token; None without rows."""
        import torch

        scored, self._scored = self._scored, None
        if scored is None:
            return None
        trainer = self._trainer
        self._measures = True
        try:
            with torch.no_grad():
                result = trainer._get_per_token_logps_and_entropies(
                    trainer.model, scored.ids, scored.attention, scored.responses, batch_size=len(scored.ids)
                )
        finally:
            self._measures = False
        # Padding is after a response, and before its prompt.
        response = scored.attention[:, -scored.responses :] > 0
        d = (result[0].double() - scored.log_probs.double())[response]
        d = d[torch.isfinite(d)]
        return float((torch.expm1(d) - d).mean()) if len(d) else None
