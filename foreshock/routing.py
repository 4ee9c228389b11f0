"""Routing probes: two scorers replay a step and the routed experts of a mixture of experts are compared.

The experts of all tokens are larger than their log-probs by the number of layers times that of experts per token, so
they stay on the worker: it computes the measures and sends those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foreshock.fingerprint import Fingerprint
from foreshock.json_values import json_value, number_or_nan
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.routing import LayerRouting, RoutedTokens, RoutingMeasures

__all__ = [
    "MOST_LAYERS",
    "RoutingComparison",
]

MOST_LAYERS = 512
"""Largest number of layers in a comparison, which bounds its size."""


@dataclass(frozen=True, slots=True)
class RoutingComparison:
    """The routes of the scores `target` (π) and `behaviour` (μ) at one step, such as `vllm.prefill` or
    `torch.float32@rebatched`, compared."""

    target: str
    behaviour: str
    target_fingerprint: Fingerprint
    behaviour_fingerprint: Fingerprint
    measures: RoutingMeasures

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values; NaN is None."""
        value: dict[str, Any] = json_value(
            {
                "target": self.target,
                "behaviour": self.behaviour,
                "target_fingerprint": self.target_fingerprint.to_dict(),
                "behaviour_fingerprint": self.behaviour_fingerprint.to_dict(),
                "measures": asdict(self.measures),
            }
        )
        return value

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoutingComparison:
        """Return the comparison of `to_dict()`; other keys of `values` are ignored."""
        return cls(
            target=values["target"],
            behaviour=values["behaviour"],
            target_fingerprint=Fingerprint.from_dict(values["target_fingerprint"]),
            behaviour_fingerprint=Fingerprint.from_dict(values["behaviour_fingerprint"]),
            measures=_measures(values["measures"]),
        )


def _measures(values: Mapping[str, Any]) -> RoutingMeasures:
    return RoutingMeasures(
        top_k=values["top_k"],
        layers=tuple(
            LayerRouting(
                layer=each["layer"],
                agreement=_interval(each["agreement"]),
                overlap=_interval(each["overlap"]),
                first_differences=_interval(each["first_differences"]),
            )
            for each in values["layers"]
        ),
        any_difference=_interval(values["any_difference"]),
        k3_share=_interval(values["k3_share"]),
        all_tokens=_tokens(values["all_tokens"]),
        agreeing=_tokens(values["agreeing"]),
        differing=_tokens(values["differing"]),
        groups=values["groups"],
        excluded=values["excluded"],
        reliable=values["reliable"],
    )


def _tokens(values: Mapping[str, Any]) -> RoutedTokens:
    return RoutedTokens(values["tokens"], values["rollouts"], _interval(values["k3_kl"]), _interval(values["abs_d"]))


def _interval(values: Mapping[str, Any]) -> Interval:
    mean, low, high = (number_or_nan(values[name]) for name in ("mean", "low", "high"))
    return Interval(mean, low, high, values["clusters"])
