"""The advised correction in verl: `algorithm.rollout_correction`, which its trainers read on the driver in each step.

In bypass mode the workers correct, with copies of the configuration, so that it cannot change in mid-run.
"""

from typing import Any

from foreshock.learning_rate.levers import Correction

__all__ = ["Settings"]

# verl clamps log ρ to ±20: nothing is below e^−20.7.
_NO_LOWER_BOUND = 1e-9


class Settings:
    """The settings of a trainer, and those of its configuration."""

    def __init__(self, trainer: Any) -> None:
        self._config = trainer.config
        node = trainer.config.algorithm.get("rollout_correction", None) or {}
        self._own = {name: node.get(name, None) for name in ("rollout_is", "rollout_is_threshold")}

    def apply(self, correction: Correction | None) -> str | None:
        """Set the correction, with None that of the configuration; return why it cannot be set.

        It is set in place: a trainer has the node in hand when it computes the log-probs of the step. Without a node in
        the configuration it is read from the next step on.
        """
        from omegaconf import open_dict

        algorithm = self._config.algorithm
        wanted = self._own if correction is None else _wanted(correction)
        if correction is not None:
            settings = " ".join(f"algorithm.rollout_correction.{name}={value}" for name, value in wanted.items())
            if (algorithm.get("rollout_correction", None) or {}).get("bypass_mode", False):
                return f"in bypass mode the workers correct; put {settings} into the configuration and restart"
            if not self._config.actor_rollout_ref.rollout.get("calculate_log_probs", False):
                return f"set actor_rollout_ref.rollout.calculate_log_probs=True {settings} and restart"
        with open_dict(self._config):
            if algorithm.get("rollout_correction", None) is None:
                algorithm.rollout_correction = {}
            for name, value in wanted.items():
                algorithm.rollout_correction[name] = value
        return None


def _wanted(correction: Correction) -> dict[str, Any]:
    bounds = correction.bounds
    level = "sequence" if correction.kind.startswith("sequence") else "token"
    if correction.kind.endswith("tis"):
        return {"rollout_is": level, "rollout_is_threshold": bounds.upper}
    lower = _NO_LOWER_BOUND if bounds.lower is None else bounds.lower
    return {"rollout_is": level, "rollout_is_threshold": f"{lower:g}_{bounds.upper:g}"}
