"""Routing probes: two scorers replay a step and the routed experts of a mixture of experts are compared.

The experts of all tokens are larger than their log-probs, by the number of layers times the number of experts per
token. They stay on the worker, which computes the measures and sends only these.
"""

from typing import Annotated, Any

from foreshock.api.records import Record
from foreshock.measures.routing import RoutingMeasures

MOST_LAYERS = 512
"""Largest number of layers in a comparison, which bounds its size."""


class RoutingComparison(Record):
    """A comparison of the routed experts of two scores at one step, as a worker sends it."""

    target: Annotated[str, "the score that gives π: a scorer, or scorer@variant"]
    behaviour: Annotated[str, "the score that gives μ"]
    target_fingerprint: dict[str, Any]
    behaviour_fingerprint: dict[str, Any]
    measures: RoutingMeasures
