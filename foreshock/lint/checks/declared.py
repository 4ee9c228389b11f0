"""What is declared: the sampling of the rollouts, and the weights version of the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.counting import Counting, Counts, largest
from foreshock.lint.judging import Check, Clean, Finding, Judging, Outcome, format_number
from foreshock.rollouts.batch import RolloutBatch

# Below this temperature engines take the likeliest token and leave the log-probs unchanged (vLLM: _SAMPLING_EPS).
_GREEDY = 1e-5


@dataclass
class Declared(Counts):
    """Rollouts by their declared sampling: the columns, else the batch attributes, else the engine's fingerprint."""

    tempered: int = 0
    truncated: int = 0
    shaped: int = 0
    plain: int = 0  # temperature 1, top-p 1, and neither top-k nor min-p
    sampling_unknown: int = 0
    mode_raw: int = 0
    mode_processed: int = 0
    mode_unknown: int = 0
    raw_and_shaped: int = 0
    processed_and_truncated: int = 0
    shaped_mode_unknown: int = 0
    unknown_repeat_chance: int = 0  # greedy, or shaped and logged raw: log μ does not give the chance of a repeat
    bypass: int = 0
    policy: int = 0
    entropy_of_trainer: int = 0
    entropy_of_engine: int = 0
    versions_alone: int = 0  # with weights versions, and no version of the trainer
    max_temperature: float = largest()
    minus_min_temperature: float = largest()
    minus_min_top_p: float = largest()
    minus_min_top_k: float = largest()
    max_min_p: float = largest()

    def add_batch(self, counting: Counting) -> None:
        batch, attributes = counting.batch, counting.batch.attributes
        names = ("temperature", "top_p", "top_k", "min_p")
        temperature, top_p, top_k, min_p = (_declared(batch, name) for name in names)
        # NaN (not declared) compares False: such a rollout counts as neither tempered nor truncated.
        tempered = (temperature != 1.0) & ~np.isnan(temperature)
        truncated = (top_p < 1.0) | (top_k > 0) | (min_p > 0.0)
        shaped = tempered | truncated
        unknown = np.isnan(temperature) & np.isnan(top_p) & np.isnan(top_k) & np.isnan(min_p)
        fingerprint, rollouts = attributes.engine_fingerprint, batch.num_rollouts
        mode = attributes.logprobs_mode or (None if fingerprint is None else fingerprint.logprobs_mode)
        raw, processed = mode == "raw_logprobs", mode == "processed_logprobs"
        alone = batch.weights_version is not None and attributes.trainer_weights_version is None
        plain = ~shaped & ~np.isnan(temperature) & ~np.isnan(top_p)
        unknown_chance = temperature < _GREEDY if processed else shaped
        self.add(tempered=tempered, truncated=truncated, shaped=shaped, plain=plain, sampling_unknown=unknown)
        self.add(mode_raw=rollouts * raw, mode_processed=rollouts * processed, mode_unknown=rollouts * (mode is None))
        self.add(raw_and_shaped=shaped & raw, processed_and_truncated=truncated & processed)
        self.add(shaped_mode_unknown=shaped & (mode is None), unknown_repeat_chance=unknown_chance)
        self.add(bypass=rollouts * (attributes.trainer_policy == "bypass"))
        self.add(policy=rollouts * (attributes.trainer_policy is not None), versions_alone=rollouts * alone)
        self.add(entropy_of_trainer=rollouts * (attributes.entropy_policy == "trainer"))
        self.add(entropy_of_engine=rollouts * (attributes.entropy_policy == "rollout"))
        if shaped.any():
            self.add(max_temperature=_largest(temperature), minus_min_temperature=_largest(-temperature))
            self.add(minus_min_top_p=_largest(-top_p), minus_min_top_k=_largest(-top_k[top_k > 0]))
            self.add(max_min_p=_largest(min_p))

    @property
    def is_plain(self) -> bool:
        """True if all rollouts are declared as plain samples."""
        return self.sampling_unknown == 0 and self.shaped == 0

    @property
    def lowest_temperature(self) -> float:
        """The lowest declared temperature; infinite if no rollout is shaped."""
        return -self.minus_min_temperature

    @property
    def greedy(self) -> bool:
        """True if some rollouts were sampled greedily."""
        return self.lowest_temperature < _GREEDY

    @property
    def lowest_top_k(self) -> float:
        """The lowest declared top-k above 0; not finite if there is none."""
        return -self.minus_min_top_k

    @property
    def parameters(self) -> str:
        """The declared parameters that differ from plain sampling, such as `temperature 0.7, top-p 0.9`."""
        parts = []
        low, high, top_p = self.lowest_temperature, self.max_temperature, -self.minus_min_top_p
        if self.tempered:
            parts.append(f"temperature {format_number(low)}" + (f" to {format_number(high)}" if high > low else ""))
        if top_p < 1:
            parts.append(f"top-p {format_number(top_p)}")
        if math.isfinite(self.lowest_top_k):
            parts.append(f"top-k {format_number(self.lowest_top_k)}")
        if self.max_min_p > 0:
            parts.append(f"min-p {format_number(self.max_min_p)}")
        return ", ".join(parts) or "shaped sampling"


def _declared(batch: RolloutBatch, name: str) -> NDArray[np.float64]:
    """Return a sampling parameter by rollout, shape [N]: its own, else the batch's, else the engine's, else NaN."""
    column = getattr(batch, name)
    value = getattr(batch.attributes, name)
    if value is None and batch.attributes.engine_fingerprint is not None:
        value = getattr(batch.attributes.engine_fingerprint, name)
    default = np.full(batch.num_rollouts, np.nan if value is None else float(value))
    return default if column is None else np.where(np.isnan(column), default, column)


def _largest(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max(initial=-np.inf))


def _check_lag(judging: Judging) -> Outcome:
    alone = judging[Declared].versions_alone
    if not alone:
        return Clean()
    seen = f"{alone:,} rollouts have a weights_version, and no trainer_weights_version is declared."
    return Finding("info", seen, {"rollouts": alone})


LAG_UNKNOWN = Check(
    "lag_unknown",
    "the lag is unknown",
    "All tokens are judged as if engine and trainer held the same weights: staleness looks like numerics.",
    "Declare trainer_weights_version (batch attributes): the version of the weights that computed log π.",
    _check_lag,
    explains=False,
)
