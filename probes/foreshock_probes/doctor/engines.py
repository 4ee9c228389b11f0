"""Replays by real engines: the log-probs of the same tokens by an engine with one option changed."""

from __future__ import annotations

import textwrap
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.digests import weights_digest
from foreshock.doctor.changes import CannotTryError
from foreshock.errors import ForeshockError
from foreshock.parsing import parse_json
from foreshock.rollouts import RolloutBatch, decode_scores, encode_rollouts
from foreshock_probes.adapters import base_folder_of, is_adapter, is_loaded_by
from foreshock_probes.engines.process import run_tasks
from foreshock_probes.scorers.request import ScoreTask

_LONGEST_REASON = 240


class EngineReplays:
    """Scores rollouts with the weights in a folder by scorers such as `vllm.decode` or `vllm.decode:dtype=float32`.

    Options of the scorer follow the colon, separated by commas. Each scorer is asked once, in a process of its own,
    because an engine that refuses a request would refuse it again. Files are exchanged in `files`.
    """

    def __init__(self, batch: RolloutBatch, folder: Path, files: Path) -> None:
        self._batch, self._folder, self._files = batch, folder, files
        self._known: dict[str, NDArray[np.float32] | str] = {}

    def log_probs(self, asked: str) -> NDArray[np.float32]:
        """Return the log-probs [T]. Raises CannotTryError with the engine's shortened message."""
        if asked not in self._known:
            try:
                self._known[asked] = self._scored(asked)
            except ForeshockError as error:
                self._known[asked] = textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" …")
        found = self._known[asked]
        if isinstance(found, str):
            raise CannotTryError(found)
        return found

    def _scored(self, asked: str) -> NDArray[np.float32]:
        scorer, options = scorer_and_options(asked)
        adapter = self._folder if is_adapter(self._folder) else None
        if adapter is not None and not is_loaded_by(scorer, adapter):
            raise CannotTryError(f"{scorer} does not load this LoRA adapter, and a merge would round its weights")
        task = ScoreTask(
            scorer,
            "",
            self._rollouts,
            self._folder if adapter is None else base_folder_of(adapter),
            self._digest,
            adapter=adapter,
            options=options,
            result=self._files / "scores.parquet",
        )
        (scores,) = run_tasks([task], lambda each: decode_scores(each.result.read_bytes()), self._files).results
        return scores.log_probs

    @cached_property
    def _digest(self) -> str:
        return weights_digest(self._folder)

    @cached_property
    def _rollouts(self) -> Path:
        path = self._files / "rollouts.parquet"
        path.write_bytes(encode_rollouts(self._batch))
        return path


def scorer_and_options(asked: str) -> tuple[str, dict[str, Any]]:
    """Return the scorer and the options of a text such as `vllm.decode:dtype=float32`."""
    scorer, _, options = asked.partition(":")
    pairs = (each.partition("=") for each in options.split(",") if each)
    return scorer, {name: _option_value(value) for name, _, value in pairs}


def _option_value(word: str) -> Any:
    """Return JSON, such as null and 8, or else the word itself."""
    try:
        return parse_json(word)
    except ValueError:
        return word
