"""What a scorer is asked and what it gives back. Imported in the worker and in the engine's process alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from foreshock.errors import ForeshockError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch

__all__ = ["Options", "ScoreRequest", "Scored", "UnsupportedScoreError", "WarmModel", "parse_options"]

T = TypeVar("T")
Chosen = TypeVar("Chosen", bound="Options")


class UnsupportedScoreError(ForeshockError):
    """The scorer cannot score this truthfully, so it does not; the message says why and what would work."""


class Options(BaseModel):
    """The options of a scorer. An unknown one is an error: a misspelt option would give a score that is not meant."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score the response tokens of `rollouts` with the weights in `weights_folder`.

    `variant` is "" or the name of another way to do the same computation ("rebatched": another batch composition,
    which gives the noise floor). `options` are as a client wrote them; the scorer parses them.
    """

    scorer: str
    variant: str
    rollouts: RolloutBatch
    weights_folder: Path
    weights_digest: str
    weights_version: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    accelerator: str = "cpu"


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """[T] log-probs (natural, float32) of all response tokens in the order of the request, and what made them."""

    log_probs: NDArray[np.float32]
    fingerprint: Fingerprint


Report = Callable[[int], None]  # called with the number of response tokens scored so far


class WarmModel:
    """The one model that an engine's process keeps loaded between requests."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._model: Any = None

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """The model of `key`, loaded unless it is the one already there; another one is dropped first."""
        if self._model is None or self._key != key:
            self._model = None
            self._model, self._key = load(), key
        model: T = self._model
        return model


def parse_options(kind: type[Chosen], request: ScoreRequest) -> Chosen:
    """The request's options as `kind`; raises UnsupportedScoreError that names the wrong option and its choices."""
    try:
        return kind.model_validate(dict(request.options))
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(str(part) for part in wrong["loc"]) or "options"
        known = ", ".join(kind.model_fields)
        raise UnsupportedScoreError(
            f"{request.scorer}: option {name!r}: {wrong['msg']} (the options are: {known})"
        ) from error
