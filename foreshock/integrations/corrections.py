"""The advised correction as settings of TRL's and of verl's trainer, which read them in each step.

Each function keeps the settings of the configuration and returns a `SetCorrection` of the trainer.
"""

from collections.abc import Callable
from typing import Any, Final

from foreshock.learning_rate.levers import Correction

__all__ = ["SetCorrection", "of_trl", "of_verl"]

SetCorrection = Callable[[Correction | None], str | None]
"""Changes a trainer's settings, with None back to its own configuration, and returns why it cannot; None: it did. A
refusal names what to put into the configuration."""

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
# verl clamps log ρ to ±20: nothing is below e^−20.7.
_NO_LOWER_BOUND = 1e-9


def of_trl(trainer: Any) -> SetCorrection:
    """Set attributes of the trainer, which it reads when it scores the rollouts of a step.

    They can change in mid-run if it computes the trainer's log-probs before the update at all
    (`vllm_importance_sampling_correction=True`, the default).
    """
    names = (_MODE, _MOST, _LEAST) if hasattr(trainer, _MOST) else (_MODE, _CAP)
    own = {name: getattr(trainer, name, None) for name in names}

    def change(correction: Correction | None) -> str | None:
        wanted = own
        if correction is not None:
            bounds = correction.bounds
            known = {_MODE: _MODES[correction.kind], _MOST: bounds.upper, _CAP: bounds.upper, _LEAST: bounds.lower}
            wanted = {name: known[name] for name in own}
            refused = _refused_by_trl(trainer, correction, wanted)
            if refused is not None:
                return refused
        for name, value in wanted.items():
            setattr(trainer, name, value)
        return None

    return change


def _refused_by_trl(trainer: Any, correction: Correction, wanted: dict[str, Any]) -> str | None:
    settings = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    if not hasattr(trainer, _MODE):
        return f"{type(trainer).__name__} has no importance-sampling correction; GRPOTrainer has: {settings}"
    if not getattr(trainer, "use_vllm", False):
        return "without use_vllm=True there are no log-probs of the engine to correct by"
    if not getattr(trainer, "vllm_importance_sampling_correction", False):
        return f"set vllm_importance_sampling_correction=True, {settings} in GRPOConfig and restart"
    if correction.bounds.lower is not None and _LEAST not in wanted:
        return f"this release of TRL has no lower bound; newer ones have {settings}"
    if correction.kind.startswith("sequence") and getattr(trainer, "loss_type", None) == "vespo":
        return "VESPO's loss takes corrections of tokens only"
    return None


def of_verl(trainer: Any) -> SetCorrection:
    """Set `algorithm.rollout_correction`, which verl's trainers read on the driver in each step.

    It is set in place: a trainer has the node in hand when it computes the log-probs of the step. Without a node in the
    configuration it is read from the next step on. In bypass mode the workers correct, with copies of the
    configuration, so that it cannot change in mid-run.
    """
    config = trainer.config
    node = config.algorithm.get("rollout_correction", None) or {}
    own = {name: node.get(name, None) for name in ("rollout_is", "rollout_is_threshold")}

    def change(correction: Correction | None) -> str | None:
        from omegaconf import open_dict

        algorithm, wanted = config.algorithm, own
        if correction is not None:
            lower, upper = correction.bounds.lower, correction.bounds.upper
            threshold = f"{_NO_LOWER_BOUND if lower is None else lower:g}_{upper:g}"
            wanted = {
                "rollout_is": "sequence" if correction.kind.startswith("sequence") else "token",
                "rollout_is_threshold": upper if correction.kind.endswith("tis") else threshold,
            }
            settings = " ".join(f"algorithm.rollout_correction.{name}={value}" for name, value in wanted.items())
            if (algorithm.get("rollout_correction", None) or {}).get("bypass_mode", False):
                return f"in bypass mode the workers correct; put {settings} into the configuration and restart"
            if not config.actor_rollout_ref.rollout.get("calculate_log_probs", False):
                return f"set actor_rollout_ref.rollout.calculate_log_probs=True {settings} and restart"
        with open_dict(config):
            if algorithm.get("rollout_correction", None) is None:
                algorithm.rollout_correction = {}
            algorithm.rollout_correction.update(wanted)
        return None

    return change
