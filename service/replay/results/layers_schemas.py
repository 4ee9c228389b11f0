"""The HTTP schemas of comparisons by layer."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from foreshock.comparisons import comparison_name
from foreshock.interval_names import RANGE, RANGE_NOTE
from foreshock.layer_divergence import LayerComparison, names_of_places
from foreshock_service.platform.parameters import LARGEST_STEP, JsonObject, Step
from foreshock_service.replay.probes.schemas import ScorerName

MOST_LAYERS = 1_000
Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=LARGEST_STEP)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LayerMean(_Strict):
    """A mean over states with its interval by prompt group; null if it cannot be estimated."""

    mean: Size | None
    low: Size | None = Field(description=f"of a {RANGE}. {RANGE_NOTE}")
    high: Size | None


class LayerDistance(_Strict):
    """The distances of two sets of states h and r at one place."""

    relative_l2: LayerMean = Field(description="‖h − r‖/‖r‖")
    relative_l2_p99: Size | None = Field(description="0.99 quantile of ‖h − r‖/‖r‖ over states")
    cosine: LayerMean = Field(description="1 − cos(h, r)")


class LayerBody(_Strict):
    """One place: `embeddings`, the output of `layers.N`, or `norm`, the input of the head."""

    name: Annotated[str, StringConstraints(max_length=100)]
    distance: LayerDistance = Field(description="of the compared scorer from the reference")
    compared_floor: LayerDistance = Field(description="of the compared scorer in other batches from itself")
    reference_floor: LayerDistance = Field(description="of the reference in other batches from itself")


class LayersBody(_Strict):
    """A comparison by layer, as a worker sends it."""

    step: Step
    compared: ScorerName
    reference: ScorerName
    rollouts: Count = Field(description="rollouts with a compared state")
    groups: Count = Field(description="prompt groups of these rollouts")
    tokens: int = Field(ge=0, lt=2**63, description="response tokens of the probe")
    states: int = Field(ge=0, lt=2**63, description="compared states, at each place")
    non_finite: int = Field(ge=0, lt=2**63, description="states left out: a distance is NaN or infinite")
    layers: list[LayerBody] = Field(min_length=3, max_length=MOST_LAYERS + 2)
    compared_fingerprint: JsonObject
    reference_fingerprint: JsonObject

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        expected = names_of_places(len(self.layers) - 2)
        if tuple(layer.name for layer in self.layers) != expected:
            raise ValueError(f"layers must be {expected[0]}, {expected[1]}, … {expected[-1]} in this order")
        return self


class DepartureRead(BaseModel):
    """The first layer that departs beyond its noise floor."""

    layer: str
    earliest: str = Field(
        description="another layer than `layer` if intervals of layers before it overlap those of their floors, but "
        "means do not: then the first one is one of these"
    )


class LayerRead(LayerBody):
    """One place as it is shown."""

    departs: bool = Field(description="the interval of `relative_l2` lies above those of both noise floors")


class LayersRead(BaseModel):
    """A comparison of two scorers by layer, from the embeddings to the input of the head."""

    pair: str = Field(description="`compared/reference`")
    compared: str
    reference: str
    rollouts: int
    groups: int
    tokens: int
    states: int
    non_finite: int
    departure: DepartureRead | None = Field(description="null: no layer departs beyond its noise floor")
    sentence: str
    layers: list[LayerRead]
    compared_fingerprint: dict[str, Any]
    reference_fingerprint: dict[str, Any]

    @classmethod
    def of(cls, found: LayerComparison) -> Self:
        """Return the comparison as it is shown."""
        values = found.to_dict()
        shown = [
            LayerRead(**written, departs=layer.departs)
            for written, layer in zip(values.pop("layers"), found.layers, strict=True)
        ]
        departure = found.departure
        return cls(
            **{name: value for name, value in values.items() if name in cls.model_fields},
            pair=comparison_name(found.compared, found.reference),
            departure=DepartureRead(layer=departure.layer, earliest=departure.earliest) if departure else None,
            sentence=found.in_words(),
            layers=shown,
        )


class LayersStepRead(BaseModel):
    """The newest comparison of each pair of a step, the newest first."""

    run: str
    attempt: int
    step: int
    items: list[LayersRead]
