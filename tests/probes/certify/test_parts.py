"""Parts in an engine's process: one that fails leaves the others, one at which the process dies has the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.digests import weights_digest
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import ScoreBatch, encode_scores
from foreshock_probes.certify import parts
from foreshock_probes.certify.parts import Part, Work, run_part, shortened
from foreshock_probes.engines.process import EngineError
from foreshock_probes.scorers.request import ScoreRequest, ScoreTask, WarmModel
from tests.probes.tiny import make_rollouts, save_checkpoint

SCORED = [Part(name=name, scorer="torch.float32", rollouts="base") for name in ("first", "second", "third")]


def work_in(folder: Path) -> Work:
    found = Work(folder, ScoreTask("", "", folder, folder, ""))
    found.add("base", make_rollouts())
    return found


class Process:
    """Stands in for `run_tasks`: dies at some parts, and scores the others."""

    def __init__(self, folder: Path, deadly: Sequence[str]) -> None:
        self.folder, self.deadly = folder, deadly
        self.starts: list[list[str]] = []

    def __call__(self, tasks: Sequence[ScoreTask], read: Any, folder: Path, **_: Any) -> None:
        names = [each["name"] for each in json.loads(tasks[0].arguments["parts"])]
        self.starts.append(names)
        batch = make_rollouts()
        for name in names:
            (self.folder / "doing").write_text(name)
            if name in self.deadly:
                raise EngineError(f"the process died at {name}", "retry")
            zeros = np.zeros(batch.num_tokens, np.float32)
            scores = ScoreBatch(batch.sample_ids, zeros, batch.response_offsets, Fingerprint("fake"))
            (self.folder / f"{name}.scores").write_bytes(encode_scores(scores))


def never() -> bool:
    return False


def test_a_new_process_does_what_a_dead_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, work = Process(tmp_path, ["second"]), work_in(tmp_path)
    monkeypatch.setattr(parts, "run_tasks", process)
    work.do(SCORED, never)
    assert process.starts == [["first", "second", "third"], ["third"]]
    assert work.problem("second") == "the process died at second"
    assert work.scores("first") is not None
    assert work.scores("third") is not None


def test_an_engine_that_always_dies_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"part {number}" for number in range(6)]
    process, work = Process(tmp_path, names), work_in(tmp_path)
    monkeypatch.setattr(parts, "run_tasks", process)
    work.do([Part(name=name, scorer="torch.float32", rollouts="base") for name in names], never)
    assert len(process.starts) == 3
    assert work.problem("part 2") == "the process died at part 2"
    assert work.problem("part 5") == "the engine's process died again and again"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "m", seed=0)


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Callable[..., Work]:
    def run_parts(*planned: Part) -> Work:
        work = work_in(tmp_path)
        given = {"parts": json.dumps([each.model_dump() for each in planned])}
        own: dict[str, Any] = {"result": tmp_path / "done", "arguments": given}
        request = ScoreRequest("torch.float32", "", make_rollouts(), model, weights_digest(model), **own)
        run_part(request, WarmModel(), lambda _: None)
        return work

    return run_parts


def test_a_part_that_fails_leaves_the_others(run: Callable[..., Work]) -> None:
    wrong = Part(name="wrong", scorer="torch.float32", rollouts="base", options={"nonsense": 1})
    missing = Part(name="missing", scorer="torch.float32", rollouts="nowhere")
    work = run(wrong, missing, SCORED[0])
    assert "option 'nonsense'" in str(work.problem("wrong"))
    assert "the set nowhere was not sampled" in str(work.problem("missing"))
    found = work.scores("first")
    assert found is not None
    assert found[0].size == make_rollouts().num_tokens
    assert found[1].engine == "torch"


def test_first_rollouts_are_scored_as_those_of_all(run: Callable[..., Work]) -> None:
    options = {"batch_size": 1}
    work = run(
        Part(name="all", scorer="torch.float32", rollouts="base", options=options),
        Part(name="some", scorer="torch.float32", rollouts="base", options=options, first=3),
    )
    every, some = work.scores("all"), work.scores("some")
    assert every is not None
    assert some is not None
    assert some[0].size == int(make_rollouts().response_offsets[3])
    np.testing.assert_array_equal(some[0], every[0][: some[0].size])


def test_long_messages_keep_both_ends() -> None:
    text = shortened(f"start {'x ' * 1000} end")
    assert text.startswith("start")
    assert text.endswith("end")
    assert len(text) < 450
