"""The trainer's side: nothing waits, nothing raises, and errors name what to do."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from foreshock import Client
from foreshock.api.watch import AlertRecord
from foreshock.client.columns import Measurements
from foreshock.client.columns import measurements as parse_measurements
from foreshock.errors import ConfigurationError
from foreshock.exporters import DEFAULT_MEASURES, Exporter, make_exporters, trackers
from foreshock.exporters.exports import step_values
from foreshock.learning_rate.advice import Advice
from foreshock.learning_rate.length_decay import Point
from foreshock.measures.registry import MEASURES
from tests.foreshock.batches import random_batch
from tests.foreshock.exporters.trained import STEPS, curve, train
from tests.ports import free_port
from tests.waiting import wait_until


class Recorder(Exporter):
    """Keeps the steps; fails or hangs on request."""

    name: ClassVar[str] = "recorder"
    module: ClassVar[str] = "json"

    def __init__(self) -> None:
        super().__init__("a run")
        self.steps: dict[int, Mapping[str, float]] = {}
        self.failures = 0
        self.hanging = threading.Event()
        self.hang = False
        self.closed = False

    def start(self, page: str) -> None:
        self.page = page

    def write(self, step: int, values: Mapping[str, float], *, closing: bool) -> bool:
        if self.failures:
            self.failures -= 1
            raise OSError("the tracker is away")
        if self.hang:
            self.hanging.wait(120)
        assert step not in self.steps, "each step once"
        self.steps[step] = values
        return True

    def close(self) -> None:
        self.closed = True


class AnotherRecorder(Recorder):
    """A second tracker."""

    name: ClassVar[str] = "another"


def test_the_default_measures_are_registered() -> None:
    assert set(DEFAULT_MEASURES) <= {measure.column for measure in MEASURES}


@pytest.mark.slow
def test_a_tracker_that_fails_gets_each_step_once_later(make: Callable[..., Client]) -> None:
    recorder = Recorder()
    recorder.failures = 2
    client = make("fails", export=recorder)
    train(client, lambda step: None)
    assert client.close()
    assert sorted(recorder.steps) == list(STEPS)
    assert {step: values["k3_kl"] for step, values in recorder.steps.items()} == pytest.approx(curve(client, "k3_kl"))
    assert recorder.closed
    assert recorder.page == f"{client.settings.url}/runs/default/fails"


@pytest.mark.slow
def test_a_hanging_tracker_delays_neither_training_nor_the_end(make: Callable[..., Client]) -> None:
    recorder, other = Recorder(), AnotherRecorder()
    recorder.hang = True
    client = make("hangs", export=[recorder, other])
    client.start_run()
    client.log_rollouts(1, random_batch(1))
    assert client.flush(300)
    wait_until(lambda: bool(other.steps))
    started = time.monotonic()
    client.log_rollouts(2, random_batch(2))
    assert time.monotonic() - started < 30
    assert client.flush(300)
    started = time.monotonic()
    client.close(2)
    assert time.monotonic() - started < 30
    assert list(other.steps) == [1, 2]
    recorder.hanging.set()


@pytest.mark.slow
def test_a_step_that_is_logged_again_is_exported_once(make: Callable[..., Client]) -> None:
    recorder = Recorder()
    client = make("again", export=recorder)
    client.log_rollouts(1, random_batch(1))
    assert client.flush(300)
    wait_until(lambda: bool(recorder.steps))
    client.log_rollouts(1, random_batch(1))
    assert client.flush(300)
    assert client.close()
    assert list(recorder.steps) == [1]


@pytest.mark.slow
def test_other_ranks_export_nothing(make: Callable[..., Client]) -> None:
    recorder = Recorder()
    client = make("rank", export=recorder)
    client.start_run(shard=1, shards=2)
    client.log_rollouts(1, random_batch(1))
    assert client.flush(300)
    client.close()
    assert recorder.steps == {}


def test_a_dead_service_costs_the_trainer_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    client = Client(f"http://127.0.0.1:{free_port()}", spool_directory=tmp_path, export=recorder)
    started = time.monotonic()
    for step in range(20):
        client.log_rollouts(step, random_batch(1))
    assert time.monotonic() - started < 30
    started = time.monotonic()
    client.close(1)
    assert time.monotonic() - started < 60
    assert recorder.steps == {}


def test_wrong_names_say_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown exporter 'wandbb'; exporters: wandb, tensorboard, mlflow"):
        Client(spool_directory=tmp_path, export="wandbb")
    with pytest.raises(ConfigurationError, match="'tensorboard' twice"):
        make_exporters(["tensorboard", "tensorboard"])


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers, "_is_installed", lambda module: False)
    with pytest.raises(ConfigurationError, match=r"pip install .*\[mlflow\]'"):
        Client(spool_directory=tmp_path, export="mlflow")


def test_an_error_in_the_environment_is_logged_and_rollouts_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORESHOCK_EXPORT", "nothing-known")
    Client(f"http://127.0.0.1:{free_port()}", spool_directory=tmp_path).close(0.1)
    assert "FORESHOCK_EXPORT is ignored, nothing is exported: unknown exporter 'nothing-known'" in caplog.text


def test_without_export_no_exporter_is_imported() -> None:
    code = "import sys, foreshock; foreshock.Client; print([name for name in sys.modules if 'exporters' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def alert(step: int, **fields: Any) -> AlertRecord:
    values: dict[str, Any] = {
        "id": "a", "attempt": 1, "rule": "k3_high", "severity": "warning", "state": "open", "value": 1.0,
        "threshold": 0.5, "why": "", "what_to_do": "", "changed_by": "detector", "opened_at_us": 1, "changed_at_us": 1,
    }  # fmt: skip
    return AlertRecord(step=step, **(values | fields))


def measured(*incomplete: dict[str, int], **columns: list[Any]) -> Measurements:
    return parse_measurements({"columns": columns, "incomplete_steps": incomplete})


def test_rows_of_both_comparisons_join_in_their_step() -> None:
    read = measured(step=[1, 2, 1], k3_kl=[0.1, None, None], reward_mean=[None, None, 0.5], other=[1, 1, 1])
    found = step_values(read, [], None, ("k3_kl", "reward_mean"), set())
    assert list(found) == [1, 2]
    assert (found[1]["k3_kl"], found[1]["reward_mean"]) == (0.1, 0.5)
    assert "k3_kl" not in found[2]
    assert "other" not in found[1]


def test_an_alert_counts_from_its_step_until_it_clears() -> None:
    read = measured(step=[1, 2, 3, 4])
    rules: set[str] = set()
    steps = step_values(read, [alert(2, state="resolved", cleared_step=4)], None, (), rules)
    assert [values["alerts/warning"] for values in steps.values()] == [0, 1, 1, 0]
    assert [values["alert/k3_high"] for values in steps.values()] == [0, 1, 1, 0]
    later = step_values(measured(step=[5]), [], None, (), rules)[5]
    assert later["alert/k3_high"] == 0, "a rule that fired once keeps its series"


def test_an_alert_that_a_person_resolved_does_not_fire() -> None:
    found = step_values(measured(step=[3]), [alert(2, state="resolved")], None, (), set())
    assert found[3]["alerts/warning"] == 0


def test_an_incomplete_step_shows_its_missing_shards() -> None:
    read = measured({"attempt": 1, "step": 2, "shards": 1, "expected_shards": 4}, step=[1, 2])
    assert [each["missing_shards"] for each in step_values(read, [], None, (), set()).values()] == [0, 3]


def test_advice_gives_the_scale_of_each_step_in_either_mode() -> None:
    advice = Advice(run="run-1", attempt=1, revision=1, mode="shadow", points=(Point(2, 1),))
    found = step_values(measured(step=[1, 2]), [], advice, (), set())
    assert (found[1]["lr_scale"], found[1]["lr_scale_advised"]) == (1.0, 1.0)
    assert (found[2]["lr_scale"], found[2]["lr_scale_advised"]) == (1.0, 0.5)
