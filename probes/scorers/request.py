"""Requests to scorers and their results, used by the worker and by the engine's process."""

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
    """The scorer cannot compute correct log-probs for this request; the message has the reason and an alternative."""


class Options(BaseModel):
    """The options of a scorer. Unknown options are errors, so that a misspelt one does not give a wrong score."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score the response tokens of `rollouts` with the weights in `weights_folder`.

    `variant` is "" or "rebatched" (another batch composition, which gives the noise floor). `options` come from the
    client unchanged; the scorer parses them. `engine_folder`: the weights that the engine was started with, if those in
    `weights_folder` are to be loaded in their place; they have the same architecture.
    """

    scorer: str
    variant: str
    rollouts: RolloutBatch
    weights_folder: Path
    weights_digest: str
    weights_version: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    accelerator: str = "cpu"
    engine_folder: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Log-probs [T] in nats of all response tokens, in the order of the request, and their fingerprint."""

    log_probs: NDArray[np.float32]
    fingerprint: Fingerprint


Report = Callable[[int], None]  # called with the number of response tokens scored so far


class WarmModel:
    """The model that an engine's process keeps loaded between requests; at most one."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._model: Any = None

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """Return the model of `key`; if another one or none is loaded, free it and call `load`."""
        if self._model is None or self._key != key:
            self._model = None
            self._model, self._key = load(), key
        model: T = self._model
        return model


def parse_options(kind: type[Chosen], request: ScoreRequest) -> Chosen:
    """Parse the request's options as `kind`. Raises UnsupportedScoreError, which names the invalid option."""
    try:
        return kind.model_validate(dict(request.options))
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(str(part) for part in wrong["loc"]) or "options"
        known = ", ".join(kind.model_fields)
        raise UnsupportedScoreError(f"{request.scorer}: option {name!r}: {wrong['msg']}; options: {known}") from error
