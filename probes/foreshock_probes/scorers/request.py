"""Requests to scorers and their results, used by the worker and by the engine's process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from foreshock.errors import ForeshockError
from foreshock.fingerprint import ADAPTER_FLAG, MERGED_ADAPTER, Fingerprint
from foreshock.process_fingerprint import process_fingerprint
from foreshock.rollouts import RolloutBatch
from foreshock_probes.engines.environment import EngineEnvironment

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Chosen = TypeVar("Chosen", bound="Options")


class UnsupportedScoreError(ForeshockError):
    """The scorer cannot compute correct log-probs for this request; the message has the reason and an alternative."""


class TooFewDevicesError(ForeshockError):
    """This machine has fewer devices than the options ask for; another worker may have enough."""


class Options(BaseModel):
    """The options of a scorer. Unknown options are errors, so that a misspelt one does not give a wrong score."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Rollouts = TypeVar("Rollouts", Path, RolloutBatch)


@dataclass(frozen=True)
class Scoring(Generic[Rollouts]):
    """Score the response tokens of `rollouts` with the weights in `weights_folder`, and write them to `result`.

    `adapter`: the folder of a LoRA adapter that the engine loads over these weights. `merged_adapter`: the weights are
    a base model with an adapter merged, because the engine does not load it. `variant` is "" or "rebatched" (another
    batch composition, which gives the noise floor). `options` come from the client unchanged; the scorer parses them.
    `function`: another task than scoring, as `module:function`, which writes the file `result`; it has `arguments`.
    """

    scorer: str
    variant: str
    rollouts: Rollouts
    weights_folder: Path
    weights_digest: str
    weights_version: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    accelerator: str = "cpu"
    adapter: Path | None = None
    merged_adapter: bool = False
    result: Path = Path()
    function: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of processes that divide the model by torch's option `tp_size`."""
        size = self.options.get("tp_size", 1)
        return size if isinstance(size, int) and size > 1 and self.function is None else 1

    def adapter_flags(self) -> dict[str, str]:
        """Return the flag of a fingerprint that says how a LoRA adapter was applied; empty without one."""
        if self.adapter is not None:
            return {ADAPTER_FLAG: "loaded by the engine"}
        return {ADAPTER_FLAG: MERGED_ADAPTER} if self.merged_adapter else {}


ScoreTask = Scoring[Path]
"""A task for an engine's process: its rollouts are a file."""
ScoreRequest = Scoring[RolloutBatch]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Log-probs [T] in nats of all response tokens, in the order of the request, and their fingerprint."""

    log_probs: NDArray[np.float32]
    fingerprint: Fingerprint


Report = Callable[[int], None]  # called with the number of response tokens scored so far


class WarmModel:
    """The model that an engine's process keeps loaded between the tasks of its job; at most one."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._model: Any = None
        self.loading_seconds = 0.0
        """Seconds that all calls of `load` took."""

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """Return the model of `key`; if it is not loaded, free the present model and call `load`."""
        if self._model is None or self._key != key:
            self._model = None
            gc.collect()  # an engine refers to itself, and another one may need its memory
            start = time.monotonic()
            self._model, self._key = load(), key
            self.loading_seconds += time.monotonic() - start
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


def score_fingerprint(
    request: ScoreRequest, engine: str, device: torch.device, *, flags: dict[str, str], **known: Any
) -> Fingerprint:
    """Return the fingerprint of a score of `engine` on `device`; the scorer gives the fields in `known`.

    At temperature 1 without truncation, raw and processed log-probs are equal; the mode is then raw.
    """
    return process_fingerprint(
        engine,
        device,
        flags=flags | request.adapter_flags(),
        held_by=EngineEnvironment.of_variables().variables(),
        logprobs_mode="raw_logprobs" if known.get("temperature") == 1.0 else "processed_logprobs",
        weights_version=request.weights_version,
        weights_digest=request.weights_digest,
        **known,
    )


def write_result(data: bytes, result: Path) -> None:
    """Write a result under a temporary name first, so that a partial file never has its name."""
    temporary = result.with_name(result.name + ".part")
    temporary.write_bytes(data)
    temporary.replace(result)


def write_arrays(path: Path, fingerprint: Fingerprint, **arrays: NDArray[Any]) -> None:
    """Write arrays that a scorer's process passes on to the worker, with the scorer's fingerprint."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, path, metadata={"fingerprint": fingerprint.to_json()})


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], Fingerprint]:
    """Return what `write_arrays` wrote."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return arrays, Fingerprint.from_json(file.metadata()["fingerprint"])
