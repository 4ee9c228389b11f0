"""Why a row is different: the doctor's cause, the layer, the tokens, and what could not be examined."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.api.doctor import DoctorReport, Finding
from foreshock.api.records import to_json
from foreshock.rollouts import RolloutBatch
from foreshock_probes.certify import explaining
from foreshock_probes.certify.certification import Asked
from foreshock_probes.certify.conditions import Condition
from foreshock_probes.certify.explaining import Explanations
from foreshock_probes.doctor.job import WITHOUT_ADAPTER
from foreshock_probes.engines.process import Done, EngineError, JobAbandonedError
from foreshock_probes.scorers.request import ScoreTask
from tests.probes.tiny import make_rollouts

TRAINER_ROW = Condition("trainer/vllm.prefill", "", "trainer base", "vllm.prefill")
ENGINE_ROW = Condition("prefix_cache", "", "prefix_cache", "vllm.decode")
TASK = ScoreTask("", "", Path(), Path("m"), "sha256:0")
CAUSE = Finding("cause", "rollout", "norm_eps", "1e-5", "the log-probs have another ε", 10, 2, share=0.99)
UNKNOWN = Finding("unknown", "rollout", "unknown", "", "reproduced by no variant. Spread over ids.", 10, 2)


def batch_with(engine: float, trainer: float | None) -> RolloutBatch:
    batch = make_rollouts()
    values = np.full(batch.num_tokens, engine, np.float32)
    other = None if trainer is None else np.full(batch.num_tokens, trainer, np.float32)
    return replace(batch, rollout_log_probs=values, trainer_log_probs=other)


class Doctor:
    """Stands in for `run_tasks`: the doctor answers with a finding, and states cannot be had."""

    def __init__(self, *findings: Finding, error: Exception | None = None) -> None:
        self.findings, self.error = findings, error
        self.given: list[dict[str, Any]] = []

    def __call__(self, tasks: Sequence[ScoreTask], read: Callable[[ScoreTask], Any], *_: Any, **__: Any) -> Done[Any]:
        if "given" not in tasks[0].arguments:
            raise EngineError("no states of a compiled model", "final")
        self.given.append(json.loads(tasks[0].arguments["given"]))
        if self.error is not None:
            raise self.error
        report = DoctorReport(2, 10, self.findings, (), (), (), 3, 1.0, "the search is complete")
        tasks[0].result.write_text(json.dumps(to_json(report)))
        return Done([read(tasks[0])], [1.0], 0.0)


@pytest.fixture
def explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Doctor], Explanations]:
    def explanations(doctor: Doctor, explain: str = "all") -> Explanations:
        monkeypatch.setattr(explaining, "run_tasks", doctor)
        asked = Asked(Path("m"), {"vllm.prefill": {}}, "torch.bfloat16", {}, explain=explain)
        return Explanations(tmp_path, asked, TASK, lambda: False)

    return explanations


def test_cause_layer_and_tokens_are_sentences(explained: Callable[[Doctor], Explanations]) -> None:
    cause, why = explained(Doctor(CAUSE)).of(TRAINER_ROW, batch_with(-1.0, -1.5), "bfloat16")
    assert cause == "norm_eps"
    assert why[0].startswith("The log-probs have another ε; explains 99.0 %")
    assert why[1] == "Layers could not be compared: no states of a compiled model."
    assert why[2].startswith("The tokens that differ most")
    assert "(-1, -1.5)" in why[2]


def test_a_row_of_the_engine_alone_has_no_layers(explained: Callable[[Doctor], Explanations]) -> None:
    cause, why = explained(Doctor(UNKNOWN)).of(ENGINE_ROW, batch_with(-1.0, None), "bfloat16")
    assert (cause, why) == ("unknown", ("Reproduced by no variant. Spread over ids.",))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_doctor_is_told_the_precision(explained: Callable[[Doctor], Explanations], dtype: str) -> None:
    doctor = Doctor(CAUSE)
    explained(doctor).of(ENGINE_ROW, batch_with(-1.0, None), dtype)
    assert doctor.given[0]["in_float32"] == (dtype == "float32")


def test_the_doctor_knows_the_model_without_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that did not get the adapter samples from these weights."""
    doctor = Doctor(CAUSE)
    monkeypatch.setattr(explaining, "run_tasks", doctor)
    asked = Asked(Path("adapter"), {"vllm.prefill": {}}, "torch.bfloat16", {})
    Explanations(tmp_path, asked, replace(TASK, adapter=Path("adapter")), lambda: False).of(
        ENGINE_ROW, batch_with(-1.0, None), "bfloat16"
    )
    assert doctor.given[0]["folders"] == {"the model": "adapter", WITHOUT_ADAPTER: "m"}
    assert doctor.given[0]["bases"] == {"the model": "m"}


def test_equal_log_probs_are_examined_once(explained: Callable[[Doctor], Explanations]) -> None:
    doctor = Doctor(CAUSE)
    explanations = explained(doctor)
    first = explanations.of(ENGINE_ROW, batch_with(-1.0, None), "bfloat16")
    assert explanations.of(ENGINE_ROW, batch_with(-1.0, None), "bfloat16") == first
    assert len(doctor.given) == 1
    explanations.of(ENGINE_ROW, batch_with(-2.0, None), "bfloat16")
    assert len(doctor.given) == 2


def test_cause_that_float32_does_not_show_is_sought_in_the_usual_precision(
    explained: Callable[[Doctor], Explanations],
) -> None:
    """Weights that were quantised and rounded again: a variant explains all of it but the last bits of float32."""
    doctor = Doctor(UNKNOWN)
    explanations = explained(doctor)

    def answer(tasks: Sequence[ScoreTask], *more: Any, **named: Any) -> Done[Any]:
        is_float32 = json.loads(tasks[0].arguments["given"])["in_float32"]
        doctor.findings = (UNKNOWN,) if is_float32 else (CAUSE,)
        return doctor(tasks, *more, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(explaining, "run_tasks", answer)
        usual = batch_with(-1.1, None)
        assert explanations.of(ENGINE_ROW, batch_with(-1.0, None), "float32", usual)[0] == "norm_eps"
        assert explanations.of(ENGINE_ROW, batch_with(-2.0, None), "float32")[0] == "unknown"


def test_a_doctor_that_fails_is_said(explained: Callable[[Doctor], Explanations]) -> None:
    doctor = Doctor(error=EngineError("the logits take 90 GB", "final"))
    assert explained(doctor).of(ENGINE_ROW, batch_with(-1.0, None), "bfloat16") == (
        "", ("The doctor could not examine it: the logits take 90 GB.",),
    )  # fmt: skip


def test_the_end_of_the_budget_ends_the_examination(explained: Callable[[Doctor], Explanations]) -> None:
    doctor = Doctor(error=JobAbandonedError("over"))
    with pytest.raises(JobAbandonedError):
        explained(doctor).of(ENGINE_ROW, batch_with(-1.0, None), "bfloat16")
