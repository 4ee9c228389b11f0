"""The names that trainers log, and the quantity of the detectors that each one is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.early_warning.default_rules import K3
from foreshock.early_warning.detectors import LEARNING_RATE_KEY, LENGTH_KEY, LONGEST_KEY, REWARD_KEY, TRUNCATED_KEY

# Quantity → names, the preferred one first: verl's, TRL's and those of plain CSV files.
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    LENGTH_KEY: (
        "response_length/mean", "response_length_mean", "response_length", "completions/mean_length",
        "completion_length",
    ),
    LONGEST_KEY: ("response_length/max", "response_length_max", "completions/max_length"),
    TRUNCATED_KEY: ("response_length/clip_ratio", "clip_ratio_len", "completions/clipped_ratio", "truncated_fraction"),
    REWARD_KEY: ("reward", "reward_mean", "reward/mean", "critic/rewards/mean", "critic/score/mean", "rewards/mean"),
    f"{STEP_ROW}:entropy_mean": ("entropy", "actor/entropy", "actor/entropy_loss", "entropy_mean"),
    "scalars:grad_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm"),
    LEARNING_RATE_KEY: ("lr", "learning_rate", "actor/lr"),
    K3: ("k3", "k3_kl", "rollout_corr/k3_kl"),
    f"{TRAINER_ROLLOUT}:rollout_probs_diff_mean": ("rollout_probs_diff_mean", "training/rollout_probs_diff_mean"),
}  # fmt: skip

STEP_NAMES = ("step", "Step", "_step", "global_step", "training/global_step")

_QUANTITIES: Final[Mapping[str, tuple[str, int]]] = {
    name: (quantity, rank) for quantity, names in NAMES.items() for rank, name in enumerate(names)
}


def quantities_of(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the values by the detectors' quantities; of several names of one quantity the preferred one counts.

    A name of the detectors (``scalars:grad_norm``) is kept, and a prefix such as ``train/`` is ignored.
    """
    best: dict[str, tuple[int, float]] = {}
    for name, value in scalars.items():
        found = _QUANTITIES.get(name) or _QUANTITIES.get(name.removeprefix("train/"))
        quantity, rank = found or (name if ":" in name else "", -1)
        if quantity and (quantity not in best or rank < best[quantity][0]):
            best[quantity] = (rank, value)
    return {quantity: value for quantity, (_, value) in best.items()}
