"""Attributes of a whole batch: its sampling parameters, and the kinds of log-probs that were logged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from foreshock.digests import canonical_json
from foreshock.errors import ConfigurationError, InvalidRolloutsError
from foreshock.fingerprint import Fingerprint
from foreshock.json_values import given
from foreshock.parsing import parse_json
from foreshock.rollouts.schema import ColumnSpec

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
TrainerPolicy = Literal["recomputed_old", "current", "bypass"]
EntropyPolicy = Literal["rollout", "trainer"]
LOGPROBS_MODES: tuple[str, ...] = get_args(LogprobsMode)
TRAINER_POLICIES: tuple[str, ...] = get_args(TrainerPolicy)
ENTROPY_POLICIES: tuple[str, ...] = get_args(EntropyPolicy)
_LONGEST_NAME = 100
_FINGERPRINTS = ("engine_fingerprint", "trainer_fingerprint")


@dataclass(frozen=True, slots=True)
class BatchAttributes:
    """Batch attributes; None means not known.

    `temperature`, `top_p`, `top_k` (-1: all) and `min_p` are the sampling defaults, which a column of that name
    overrides per rollout. `logprobs_mode` is "raw_logprobs" if the engine logged log-probs before temperature and
    truncation, "processed_logprobs" if after; without it, truncation may look like agreement. `trainer_policy` is the
    kind of `trainer_log_probs`: recomputed with the old weights before the update ("recomputed_old"), of the current
    policy ("current"), or a copy of the engine's ("bypass"). `entropy_policy` tells whether the column `entropy` is of
    μ ("rollout") or of π ("trainer"). `length_cap` is the largest number of response tokens that generation allowed.
    `engine_fingerprint` describes the engine that sampled, `trainer_fingerprint` the trainer that computed
    `trainer_log_probs`: a replay is requested in the same environment, and its environment is compared. `clip_low` and
    `clip_high` are the ε of the trainer's clip range, 1 − clip_low to 1 + clip_high. `loss_aggregation` is the
    trainer's name of how its loss averages tokens, such as "token-mean": if it changes within a run, earlier values are
    no baseline. Raises
    ConfigurationError for an invalid value.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logprobs_mode: LogprobsMode | None = None
    trainer_weights_version: int | None = None
    trainer_policy: TrainerPolicy | None = None
    entropy_policy: EntropyPolicy | None = None
    length_cap: int | None = None
    engine_fingerprint: Fingerprint | None = None
    trainer_fingerprint: Fingerprint | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    loss_aggregation: str | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "clip_low", "clip_high"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
                raise ConfigurationError(f"batch attribute `{name}` must be a number >= 0, got {value!r}")
            object.__setattr__(self, name, float(value))
        for name, least in (("top_k", -1), ("trainer_weights_version", 0), ("length_cap", 1)):
            _check_integer(name, getattr(self, name), least)
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _check_choice("trainer_policy", self.trainer_policy, TRAINER_POLICIES)
        _check_choice("entropy_policy", self.entropy_policy, ENTROPY_POLICIES)
        if self.loss_aggregation is not None and not (
            isinstance(self.loss_aggregation, str) and 0 < len(self.loss_aggregation) <= _LONGEST_NAME
        ):
            raise ConfigurationError(
                f"batch attribute `loss_aggregation` must be a name of at most {_LONGEST_NAME} characters, got "
                f"{self.loss_aggregation!r}"
            )
        for name in _FINGERPRINTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, Fingerprint):
                raise ConfigurationError(f"batch attribute `{name}` must be a Fingerprint, got {value!r}")

    def to_json(self) -> str:
        """Return the known attributes as canonical JSON, the value of the Parquet key `foreshock.batch`."""
        known = given({name: getattr(self, name) for name in self.__slots__})
        return canonical_json({name: known[name].to_dict() if name in _FINGERPRINTS else known[name] for name in known})

    @classmethod
    def from_json(cls, text: str | bytes) -> BatchAttributes:
        """Restore the attributes from `to_json()`; an attribute of a newer release is ignored.

        Raises InvalidRolloutsError if `text` is not a JSON object or a value is invalid.
        """
        try:
            values = parse_json(text)
        except ValueError as error:
            raise InvalidRolloutsError(f"the batch attributes are not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidRolloutsError(f"the batch attributes must be a JSON object, got {type(values).__name__}")
        known = {name: value for name, value in values.items() if name in cls.__slots__}
        try:
            for name in _FINGERPRINTS:
                if isinstance(known.get(name), Mapping):
                    known[name] = Fingerprint.from_dict(known[name])
            return cls(**known)
        except ConfigurationError as error:
            raise InvalidRolloutsError(str(error)) from error

    def null_value(self, column: ColumnSpec) -> float | None:
        """Return the value of a null in a column of one number per rollout; None if a null is an error.

        It is NaN for floats; for integers the attribute of the column's name, else the null value of the schema.
        """
        if column.dtype.kind == "f":
            return math.nan
        default: float | None = getattr(self, column.name, None)
        return column.null_value if default is None else default


def _check_integer(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 2**31 - 1:
        raise ConfigurationError(f"batch attribute `{name}` must be a whole number >= {least}, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigurationError(f"batch attribute `{name}` must be one of {', '.join(choices)}, got {value!r}")
