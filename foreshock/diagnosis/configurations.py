"""The recommendation from a configuration matrix: the change that lowers the mismatch most, with its price in time."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Among configurations whose k3 is within this factor of the lowest, the fastest is recommended.
NEARLY_LOWEST = 1.25


@dataclass(frozen=True, slots=True)
class Setting:
    """A scorer with the options that differ from its baseline; `seconds_per_token` None: unknown."""

    scorer: str
    changed: Mapping[str, Any]
    seconds_per_token: float | None


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """The mismatch of `comparison` with one setting of each scorer that can vary: k3 in nats and its interval."""

    comparison: str
    settings: tuple[Setting, ...]
    k3_kl: float
    low: float
    high: float

    @property
    def is_baseline(self) -> bool:
        """True if no scorer has a changed option."""
        return not any(each.changed for each in self.settings)


def recommend(measured: Sequence[MeasuredSetting]) -> str | None:
    """Return a sentence: the recommended change and its price, or that none is better. None without a baseline.

    `measured` are settings of one comparison on one hardware. A setting is better if its interval is below that of
    the baseline.
    """
    baseline = next((each for each in measured if each.is_baseline), None)
    if baseline is None or len(measured) < 2:
        return None
    better = [each for each in measured if each.high < baseline.low]
    if not better:
        return (
            f"No configuration lowers k3 of {baseline.comparison} below the interval of the present one, "
            f"{baseline.low:.2g} to {baseline.high:.2g}: keep it."
        )
    lowest = min(each.k3_kl for each in better)
    near = [each for each in better if each.k3_kl <= NEARLY_LOWEST * lowest]
    best = min(near, key=lambda each: (_seconds(each), sum(len(setting.changed) for setting in each.settings)))
    factor = f" (÷ {baseline.k3_kl / best.k3_kl:.3g})" if best.k3_kl > 0 else ""
    changes = " and ".join(f"{in_words(each.changed)} in {each.scorer}" for each in best.settings if each.changed)
    prices = [
        _price(before, after) for before, after in zip(baseline.settings, best.settings, strict=True) if after.changed
    ]
    return (
        f"With {changes}, k3 of {best.comparison} is {best.k3_kl:.2g} instead of {baseline.k3_kl:.2g}{factor}; "
        f"{', '.join(prices)}."
    )


def in_words(options: Mapping[str, Any]) -> str:
    """Return options as `head_dtype=float32, autocast=null`."""
    return ", ".join(f"{name}={_word(value)}" for name, value in options.items())


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _seconds(measured: MeasuredSetting) -> float:
    return sum(each.seconds_per_token or 0.0 for each in measured.settings)


def _price(before: Setting, after: Setting) -> str:
    if not before.seconds_per_token or after.seconds_per_token is None:
        return f"the price in time of {after.scorer} is unknown"
    change = after.seconds_per_token / before.seconds_per_token - 1
    return f"{after.scorer} takes {change:+.0%} time per token"
