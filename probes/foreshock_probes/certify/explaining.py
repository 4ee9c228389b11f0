"""Why a row is different: the doctor's cause, the first layer that departs, and the tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshock.api.doctor import DoctorReport
from foreshock.api.records import parse
from foreshock.certify.judging import largest_tokens
from foreshock.diagnosis.wording import as_sentence
from foreshock.doctor.findings import explained
from foreshock.errors import ForeshockError
from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock.scorers import ENGINE_REPLAY, REFERENCE, SCORERS, VARIANTS
from foreshock_probes.certify.conditions import Condition
from foreshock_probes.certify.parts import shortened
from foreshock_probes.doctor.job import PART as DOCTOR
from foreshock_probes.doctor.job import WITHOUT_ADAPTER
from foreshock_probes.engines.process import JobAbandonedError, run_tasks
from foreshock_probes.layer_divergence.states import PART as LAYERS
from foreshock_probes.layer_divergence.states import compare_layers
from foreshock_probes.scorers.request import ScoreTask

if TYPE_CHECKING:
    from foreshock_probes.certify.certification import Asked

_DOCTOR_SECONDS = 120.0
_ROLLOUTS = 16
"""Rollouts whose hidden states are compared."""
Why = tuple[str, tuple[str, ...]]


class Explanations:
    """Explains rows; two rows with the same log-probs are examined once."""

    def __init__(self, files: Path, asked: Asked, task: ScoreTask, abandoned: Callable[[], bool]) -> None:
        self._files, self._asked, self._task, self._abandoned = files, asked, task, abandoned
        self._layers: dict[str, str] = {}
        self._known: dict[bytes, Why] = {}

    def of(self, condition: Condition, batch: RolloutBatch, dtype: str, usual: RolloutBatch | None = None) -> Why:
        """Return the name of the cause, and sentences, also on what could not be examined.

        `batch` has the log-probs of the engine and, if the row has one, of the trainer; `usual` those in the engine's
        own precision, if `batch` is in float32: a variant may reproduce them, and not the last bits of float32.
        """
        mine, theirs = batch.rollout_log_probs, batch.trainer_log_probs
        key = b"".join(each.tobytes() for each in (mine, theirs) if each is not None)
        if key in self._known:
            return self._known[key]
        cause, found = self._cause(batch, dtype)
        if cause in ("", "unknown") and usual is not None:
            again = self._cause(usual, "")
            cause, found = (cause, found) if again[0] in ("", "unknown") else again
        if condition.name.startswith("trainer/") and self._asked.explain == "all":
            found.append(self._layer(batch, dtype))
        if mine is not None and theirs is not None:
            found.append(largest_tokens(batch, mine, theirs))
        self._known[key] = cause, tuple(found)
        return self._known[key]

    def _cause(self, batch: RolloutBatch, dtype: str) -> tuple[str, list[str]]:
        path, base = self._files / "doctor.rollouts", str(self._task.weights_folder)
        adapter = self._task.adapter and str(self._task.adapter)
        path.write_bytes(encode_rollouts(batch))
        given: dict[str, Any] = {
            "folders": {"the model": adapter or base} | ({WITHOUT_ADAPTER: base} if adapter else {}),
            "bases": {"the model": base} if adapter else {},
            "versions": {},
            "announced": "the model",
            "unusable": {},
            "budget_seconds": _DOCTOR_SECONDS,
            "in_float32": dtype == "float32",
        }
        arguments = {"given": json.dumps(given), "doing": str(self._files / "doing")}
        task = self._of(REFERENCE, path, "report.json", DOCTOR, arguments=arguments)
        try:
            (path,) = self._results(task)
        except ForeshockError as error:
            return "", [f"The doctor could not examine it: {self._reason(error)}."]
        report = parse(DoctorReport, json.loads(path.read_bytes()))
        named = report.causes or tuple(each for each in report.findings if each.kind == "unknown")
        if not named:
            return "", ["The doctor finds ordinary rounding only."]
        return named[0].cause, [
            as_sentence("; ".join(filter(None, (each.sentence.rstrip("."), explained(each))))) for each in named
        ]

    def _layer(self, batch: RolloutBatch, dtype: str) -> str:
        """Return the first layer at which the engine's prefill and the trainer depart."""
        if dtype in self._layers:
            return self._layers[dtype]
        trainer = REFERENCE if dtype == "float32" else self._asked.trainer
        if SCORERS[trainer].hidden_states is None:
            return f"{trainer} gives no hidden states to compare by layer."
        path = self._files / "layers.rollouts"
        chosen = batch.select(list(range(min(_ROLLOUTS, batch.num_rollouts))))
        path.write_bytes(encode_rollouts(chosen))
        options = {ENGINE_REPLAY: {"dtype": dtype}, trainer: dict(self._asked.trainer_options)}
        if dtype == "float32":
            options[trainer] = {}
        tasks = [
            self._of(name, path, f"states-{name}{variant}", LAYERS, variant=variant, options=options[name])
            for name in (ENGINE_REPLAY, trainer)
            for variant in VARIANTS
        ]
        try:
            paths = self._results(*tasks)
            found = compare_layers(0, chosen, {ENGINE_REPLAY: paths[:2], trainer: paths[2:]})
            self._layers[dtype] = found.sentence
        except ForeshockError as error:
            self._layers[dtype] = f"Layers could not be compared: {self._reason(error)}."
        return self._layers[dtype]

    def _results(self, *tasks: ScoreTask) -> list[Path]:
        return run_tasks(tasks, lambda each: each.result, self._files, abandoned=self._abandoned).results

    def _reason(self, error: ForeshockError) -> str:
        """Return an engine's error in one line; raise it again if the time is over."""
        if isinstance(error, JobAbandonedError):
            raise error
        return shortened(str(error))

    def _of(self, scorer: str, rollouts: Path, result: str, function: str, **fields: Any) -> ScoreTask:
        """Return a task of a process for the model."""
        result_file = self._files / result
        return replace(self._task, scorer=scorer, rollouts=rollouts, result=result_file, function=function, **fields)
