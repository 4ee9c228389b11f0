"""Connections of Foreshock to trainers, one module per framework. None is imported until it is used."""

from typing import Any, Final

__all__ = ["CLIP_SETTINGS", "clip_range"]

CLIP_SETTINGS: Final[dict[str, tuple[str, str, dict[str, tuple[object, ...]]]]] = {
    "verl": ("clip_ratio_low", "clip_ratio_high", {}),
    "trl": (
        "epsilon",
        "epsilon_high",
        {"importance_sampling_level": ("token",), "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo")},
    ),
    "slime": (
        "eps_clip",
        "eps_clip_high",
        {"advantage_estimator": ("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")},
    ),
    "skyrl": ("eps_clip_low", "eps_clip_high", {"policy_loss_type": ("regular", "dual_clip")}),
    "areal": ("eps_clip", "eps_clip_higher", {"importance_sampling_level": ("token",), "use_sapo_loss": (False,)}),
}
"""Names of the settings of PPO's clip range in these releases (vime and miles have those of slime): its lower ε, its
upper ε (without a value: the lower one), and the values of other settings with which each token's ratio is clipped to
it."""


def clip_range(framework: str, settings: Any) -> dict[str, Any]:
    """Return `clip_low` and `clip_high` as batch attributes; empty if these settings do not clip each token's ratio."""
    low, high, needed = CLIP_SETTINGS[framework]
    if any(getattr(settings, name, None) not in values for name, values in needed.items()):
        return {}
    lower = getattr(settings, low, None)
    upper = getattr(settings, high, None)
    ends = {"clip_low": lower, "clip_high": lower if upper is None else upper}
    return {name: float(value) for name, value in ends.items() if value is not None}
