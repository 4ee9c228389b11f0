"""The advised correction in TRL: the settings that `GRPOTrainer` reads when it scores the rollouts of a step.

They are attributes of the trainer, so that they can change in mid-run, as long as it computes the trainer's log-probs
before the update at all (`vllm_importance_sampling_correction=True`, the default).
"""

from typing import Any, Final

from foreshock.learning_rate.levers import Correction

__all__ = ["Settings"]

_MODES: Final = {
    "token_tis": "token_truncate",
    "token_mis": "token_mask",
    "icepop": "token_mask",
    "sequence_tis": "sequence_truncate",
    "sequence_mis": "sequence_mask",
}
_MODE, _MOST, _LEAST = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min"))
_CAP = "vllm_importance_sampling_cap"
"""The upper bound in the first releases, which have no lower one."""


class Settings:
    """The settings of a trainer, and those of its configuration."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        names = (_MODE, _MOST, _LEAST) if hasattr(trainer, _MOST) else (_MODE, _CAP)
        self._own = {name: getattr(trainer, name, None) for name in names}

    def apply(self, correction: Correction | None) -> str | None:
        """Set the correction, with None that of the configuration; return why it cannot be set."""
        refused = None if correction is None else self._refused(correction)
        wanted = self._own if correction is None else self._wanted(correction)
        if refused is None:
            for name, value in wanted.items():
                setattr(self._trainer, name, value)
        return refused

    def _wanted(self, correction: Correction) -> dict[str, Any]:
        bounds = correction.bounds
        wanted = {_MODE: _MODES[correction.kind], _MOST: bounds.upper, _CAP: bounds.upper, _LEAST: bounds.lower}
        return {name: wanted[name] for name in self._own}

    def _refused(self, correction: Correction) -> str | None:
        trainer, kind = self._trainer, type(self._trainer).__name__
        settings = ", ".join(f"{name}={value!r}" for name, value in self._wanted(correction).items())
        if not hasattr(trainer, _MODE):
            return f"{kind} has no importance-sampling correction; GRPOTrainer has: {settings}"
        if not getattr(trainer, "use_vllm", False):
            return "without use_vllm=True there are no log-probs of the engine to correct by"
        if not getattr(trainer, "vllm_importance_sampling_correction", False):
            return f"set vllm_importance_sampling_correction=True, {settings} in GRPOConfig and restart"
        if correction.bounds.lower is not None and _LEAST not in self._own:
            return f"this release of TRL has no lower bound; newer ones have {settings}"
        if correction.kind.startswith("sequence") and getattr(trainer, "loss_type", None) == "vespo":
            return "VESPO's loss takes corrections of tokens only"
        return None
