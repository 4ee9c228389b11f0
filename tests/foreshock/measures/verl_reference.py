"""verl's own measures of the same rollouts, from its `rollout_corr_helper` and `utils/debug/metrics`.

verl is imported here only, and only when needed: the product does not depend on it. Its functions take padded tensors;
`Padded` holds them, in float32 like a trainer, or in float64.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FULL_CORRECTION", "OURS", "Padded", "VerlMissingError", "correct", "debug_metrics", "off_policy_metrics",
    "require",
]  # fmt: skip

INSTALL = "pip install --no-deps verl==0.9.1 && pip install 'foreshock[bench]' torch transformers"

# The registry's column of each of verl's measures. A different name means that verl's definition is not the usual one.
OURS = {
    **{
        name: name
        for name in (
            "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "kl", "k3_kl", "log_ppl_diff",
            "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio", "rollout_probs_diff_mean",
            "rollout_probs_diff_max", "rollout_probs_diff_std", "rollout_actor_probs_pearson_corr",
        )
    },
    "chi2_token": "verl_chi2_token",
    "chi2_seq": "verl_chi2_seq",
}  # fmt: skip

# Options of verl's full report: truncated token weights; rejection by sequence, by its largest token and by token.
FULL_CORRECTION: dict[str, Any] = {
    "rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01",
}  # fmt: skip


class VerlMissingError(RuntimeError):
    """verl, or a package that its functions import, is not installed."""

    def __init__(self, missing: str | None) -> None:
        super().__init__(f"verl's functions need {missing or 'a package'} that is not installed: {INSTALL}")


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """log π, log μ and the mask of sampled tokens, [N, longest]; padding is 0."""

    target: Any
    behaviour: Any
    mask: Any

    @classmethod
    def of(
        cls,
        target: NDArray[np.floating],
        behaviour: NDArray[np.floating],
        offsets: NDArray[np.int64],
        mask: NDArray[Any] | None = None,
        *,
        width: int | None = None,
        double: bool = False,
    ) -> Padded:
        """Return the [T] values of N rollouts cut at `offsets`, padded to `width` or to the longest."""
        torch = importlib.import_module("torch")
        lengths = np.diff(offsets)
        width = max(width or 0, int(lengths.max()))
        inside = np.arange(width) < lengths[:, None]

        def padded(values: NDArray[np.floating]) -> Any:
            array = np.zeros(inside.shape, np.float64 if double else np.float32)
            array[inside] = values
            return torch.from_numpy(array)

        sampled = inside.astype(np.int64)
        if mask is not None:
            sampled[inside] = mask != 0
        return cls(padded(target), padded(behaviour), torch.from_numpy(sampled))


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise VerlMissingError(error.name) from error


def require() -> None:
    """Raise VerlMissingError if verl or one of its dependencies is missing."""
    _module("torch")
    _module("verl.trainer.ppo.rollout_corr_helper")
    _module("verl.utils.debug.metrics")


def off_policy_metrics(batch: Padded) -> dict[str, float]:
    """Return verl's thirteen metrics by its own names."""
    helper = _module("verl.trainer.ppo.rollout_corr_helper")
    found: dict[str, float] = helper.compute_offpolicy_metrics(batch.target, batch.behaviour, batch.mask)
    return found


def correct(batch: Padded, **options: Any) -> dict[str, float]:
    """Return the metrics of verl's correction with these options, by its own names."""
    helper = _module("verl.trainer.ppo.rollout_corr_helper")
    _, _, found = helper.compute_rollout_correction_and_rejection_mask(
        batch.target, batch.behaviour, batch.mask, **options
    )
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


def debug_metrics(batch: Padded) -> dict[str, float]:
    """Return verl's measures of probabilities by its own names."""
    metrics = _module("verl.utils.debug.metrics")
    columns = {
        "rollout_log_probs": batch.behaviour,
        "old_log_probs": batch.target,
        "response_mask": batch.mask,
        "responses": batch.mask,
    }
    found = metrics.calculate_debug_metrics(SimpleNamespace(batch=columns))
    return {name.removeprefix("training/"): value for name, value in found.items() if "valid" not in name}
