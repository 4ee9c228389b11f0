"""Routing probes: two scorers replay a step and the routed experts of a mixture of experts are compared.

The experts of all tokens are larger than their log-probs, by the number of layers times the number of experts per
token. They stay on the worker, which computes the measures and sends only these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foreshock.api.records import parse
from foreshock.fingerprint import Fingerprint
from foreshock.json_values import json_value
from foreshock.measures.routing import RoutingMeasures

MOST_LAYERS = 512
"""Largest number of layers in a comparison, which bounds its size."""


@dataclass(frozen=True, slots=True)
class RoutingComparison:
    """The compared routes of two scores at one step, `target` (π) and `behaviour` (μ).

    A score is named like `vllm.prefill` or `torch.float32@rebatched`.
    """

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
        """Restore the comparison from `to_dict()`; other keys of `values` are ignored."""
        return cls(
            target=values["target"],
            behaviour=values["behaviour"],
            target_fingerprint=Fingerprint.from_dict(values["target_fingerprint"]),
            behaviour_fingerprint=Fingerprint.from_dict(values["behaviour_fingerprint"]),
            measures=parse(RoutingMeasures, values["measures"]),
        )
