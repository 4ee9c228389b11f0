"""Both readers against the real service: the same tests for the reader and its async twin."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import foreshock
from foreshock.errors import Rejected, RunNotFound, ServiceUnavailable, WrongService
from foreshock.measures.registry import MEASURES
from foreshock.operating.operator import Operator
from foreshock.reading.caller import Listing, RememberedAnswers
from foreshock.reading.reader import AsyncReader, Reader
from foreshock.rollouts import decode_rollouts
from tests.foreshock.batches import random_batch
from tests.foreshock.client.faulty_service import faulty_service
from tests.foreshock.running_service import RunningService
from tests.foreshock.twins import KINDS, assert_twins, described_methods, opener
from tests.paths import DOCS, REPOSITORY
from tests.ports import free_port

PAGE = DOCS / "api.md"
READING, _, REST = PAGE.read_text().partition("## Address a run")
ADDRESS = "http://127.0.0.1:8765"
STEPS = list(range(1, 31))
DIGEST = "sha256:" + "0" * 64


@dataclass
class Made:
    """What the service has: a run with everything, and another project's run."""

    url: str
    run: str


@pytest.fixture(scope="module")
def made(real_service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Made:
    spool = tmp_path_factory.mktemp("spool")
    client = foreshock.Client(real_service.url, run_key="my-run", spool_directory=spool, strict=True)
    with client.start_run(model="M", model_kind="dense", initial_learning_rate=1e-6):
        client.log_change(3, "length_cap", before=100, after=200, note="longer")
        client.log_checkpoint(20, root="weights", path="run/step_20", digest=DIGEST)
        for step in STEPS:
            batch = random_batch(step, rollouts=8, largest=3.0 if 17 <= step < 23 else 0.1)
            client.log_rollouts(step, batch)
            client.log_scalars(step, {"grad_norm": step / 2, "odd": math.nan if step % 2 else step})
        assert client.flush(120)
        run = client.run_id
    assert run is not None
    with foreshock.Client(real_service.url, "elsewhere", "second", spool_directory=spool, strict=True) as other:
        other.log_scalars(1, {"x": 1.0})
        assert other.flush(60)
    asked = {"step": 20, "scorers": [{"scorer": "vllm.prefill"}]}
    httpx.post(f"{real_service.url}/v1/runs/{run}/probes", json=asked, timeout=60).raise_for_status()
    return Made(real_service.url, run)


@pytest.fixture(params=KINDS)
def open_reader(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A function that opens a reader of one kind."""
    with opener(request.param, Reader, AsyncReader) as open_one:
        yield open_one


@pytest.fixture
def reader(made: Made, open_reader: Callable[..., Any]) -> Any:
    """A reader of all projects."""
    return open_reader(made.url)


def test_both_readers_have_a_method_for_every_request_with_its_parameters_and_documentation() -> None:
    assert_twins(Reader, AsyncReader)


def test_runs_are_found_by_filter_key_and_id(made: Made, reader: Any) -> None:
    assert [run.key for run in reader.runs()] == ["second", "my-run"]
    assert [run.key for run in reader.runs(model="M", states=["finished"], search="Y-R")] == ["my-run"]
    found = reader.run("my-run")
    assert (found.id, found.project, found.last_step, found.state) == (made.run, "default", 30, "finished")
    assert reader.run(made.run) == found


def test_project_of_the_reader_bounds_every_list_and_key(made: Made, open_reader: Callable[..., Any]) -> None:
    elsewhere = open_reader(made.url, "elsewhere")
    assert [run.key for run in elsewhere.runs()] == ["second"]
    assert list(elsewhere.alerts_of_runs()) == []
    assert elsewhere.run("second").project == "elsewhere"
    with pytest.raises(RunNotFound):
        elsewhere.run("my-run")


def test_every_page_of_a_list_is_read(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock.reading.caller.ITEMS_ON_A_PAGE", 7)
    steps = list(reader.steps("my-run"))
    assert [step.step for step in steps] == STEPS
    assert all(step.closed and step.rollouts == 8 and step.shards == 1 for step in steps)
    assert [attempt.attempt for attempt in reader.attempts("my-run")] == [1]


def test_changes_and_checkpoints(reader: Any) -> None:
    (change,) = (each for each in reader.changes("my-run") if each.kind == "length_cap")
    assert (change.step, change.before, change.after, change.note, change.rebaseline) == (3, 100, 200, "longer", True)
    (checkpoint,) = reader.checkpoints("my-run")
    assert (checkpoint.step, checkpoint.root, checkpoint.path, checkpoint.digest) == (
        20,
        "weights",
        "run/step_20",
        DIGEST,
    )


def test_measurements_are_numpy_columns(reader: Any) -> None:
    assert {measure.name for measure in reader.measures()} == {measure.name for measure in MEASURES}
    measured = reader.measurements(
        "my-run", measures=["k3_kl", "chi2_token"], comparisons=["trainer/rollout"], from_step=5, to_step=24
    )
    steps, k3 = measured.curve("trainer/rollout", "k3_kl")
    assert steps.dtype == np.int64
    assert steps.tolist() == list(range(5, 25))
    assert k3.dtype == np.float64
    assert k3[steps == 20] > 10 * k3[steps == 6]
    assert measured.columns.rows == 20
    assert measured.columns["from_sample"].dtype == np.bool_
    assert measured.incomplete_steps == ()
    everything = reader.measurements("my-run").columns
    assert {everything[measure.column].dtype for measure in MEASURES} == {np.dtype(np.float64)}
    with pytest.raises(KeyError, match="no column 'mean_d'; columns: step, "):
        measured.curve("trainer/rollout", "mean_d")


def test_down_sampling_keeps_the_extreme(reader: Any) -> None:
    steps, k3 = reader.measurements("my-run", measures=["k3_kl"]).curve("trainer/rollout", "k3_kl")
    few, values = reader.measurements("my-run", measures=["k3_kl"], max_points=6).curve("trainer/rollout", "k3_kl")
    assert len(few) <= 6 < len(steps)
    assert values.max() == k3.max()


def test_scalars_have_nan_for_what_is_not_finite(reader: Any) -> None:
    scalars = reader.scalars("my-run", names=["odd", "grad_norm"], sources=["trainer"])
    steps, values = scalars.curve("odd", "trainer")
    assert steps.tolist() == STEPS
    assert np.isnan(values).tolist() == [step % 2 == 1 for step in STEPS]
    assert scalars.curve("grad_norm")[1].tolist() == [step / 2 for step in STEPS]
    assert scalars.columns.to_arrow().column("value").null_count == 15


def test_columns_are_a_data_frame_in_one_call(reader: Any) -> None:
    pandas = pytest.importorskip("pandas")
    columns = reader.measurements("my-run").columns
    for frame in (columns.to_pandas(), pandas.DataFrame(columns)):
        assert list(frame.columns) == list(columns)
        assert frame["k3_kl"].to_numpy() == pytest.approx(columns["k3_kl"], nan_ok=True)
    shown = columns._repr_html_()
    assert shown.count("<tr>") == 21
    assert f"20 of {columns.rows} rows" in shown
    with pytest.raises(KeyError, match="did you mean 'k3_kl'"):
        columns["k3_lk"]


def test_exports_are_the_files_of_the_same_columns(reader: Any) -> None:
    chosen = {"measures": ["k3_kl"], "comparisons": ["trainer/rollout"]}
    measured = reader.measurements("my-run", **chosen).columns
    parquet = pq.read_table(io.BytesIO(reader.export_measurements("my-run", "parquet", **chosen)))
    assert parquet.column_names == list(measured)
    assert parquet["k3_kl"].to_pylist() == measured["k3_kl"].tolist()
    csv = pyarrow.csv.read_csv(io.BytesIO(reader.export_measurements("my-run", "csv", **chosen)))
    assert csv["k3_kl"].to_pylist() == measured["k3_kl"].tolist()
    scalars = pq.read_table(io.BytesIO(reader.export_scalars("my-run", "parquet", names=["grad_norm"])))
    assert scalars["value"].to_pylist() == [step / 2 for step in STEPS]


def test_rollouts_of_a_step_are_one_parquet_file(reader: Any) -> None:
    file = reader.export_rollouts("my-run", 20)
    rows = {step.step: step.rollouts for step in reader.steps("my-run")}[20]
    assert pq.read_table(io.BytesIO(file)).num_rows == decode_rollouts(file).num_rollouts == rows


def test_buckets_and_token_ids(reader: Any) -> None:
    buckets = reader.buckets("my-run", 20)
    assert len(buckets.edges) == buckets.columns.rows + 1
    assert np.all(np.diff(buckets.edges) > 0)
    tokens = {step.step: step.tokens for step in reader.steps("my-run")}[20]
    assert 0 < buckets.columns["tokens"].sum() <= tokens
    assert np.isnan(buckets.columns["k3_kl"]).tolist() == (buckets.columns["tokens"] == 0).tolist()
    assert reader.buckets("my-run", 20, by="position").by == "position"
    by_id = reader.token_ids("my-run", 20, limit=5)
    assert by_id.columns["token_id"].shape == (5,)
    assert np.all(np.diff(by_id.columns["k3_sum"]) <= 0)


def test_worst_tokens_and_one_rollout(reader: Any) -> None:
    worst = reader.worst_tokens("my-run", 20, count=3)
    assert worst.columns.rows == 3
    assert np.all(np.diff(np.abs(worst.columns["d"])) <= 0)
    assert worst.columns["d"] == pytest.approx(worst.log_probs["trainer"] - worst.log_probs["rollout"])
    sample = worst.columns["sample_id"][0]
    rollout = reader.rollout_tokens("my-run", 20, sample)
    assert rollout.sample_id == sample
    assert rollout.prompt_token_ids.dtype == np.int64
    assert rollout.columns["position"].tolist() == list(range(rollout.columns.rows))
    part = reader.rollout_tokens("my-run", 20, sample, from_position=1, to_position=2)
    assert part.columns["position"].tolist() == [1, 2][: rollout.columns.rows - 1]
    assert np.nanmax(np.abs(rollout.columns["d"])) == np.abs(worst.columns["d"])[0]


def test_diagnosis_alerts_advice_and_probes(made: Made, reader: Any) -> None:
    assert reader.diagnosis("my-run").headline == reader.run("my-run").diagnosis.headline
    alerts = list(reader.alerts("my-run"))
    assert alerts
    assert all(alert.why for alert in alerts)
    (everywhere,) = [alert for alert in reader.alerts_of_runs(rules=[alerts[0].rule]) if alert.id == alerts[0].id]
    assert (everywhere.run, everywhere.run_key, everywhere.project) == (made.run, "my-run", "default")
    assert list(reader.alerts_of_runs(states=["retracted"], severities=["info"], rules=["no_such"])) == []
    advice = reader.advice("my-run", step=31)
    assert (advice.advice.mode, advice.advice.observed_step) == ("shadow", 30)
    assert [decision.kind for decision in reader.decisions("my-run")][:1] in ([], ["surge"], ["rule_halving"], ["mode"])
    (probe,) = reader.probes("my-run", step=20)
    assert probe.jobs[0].scorers[0].scorer == "vllm.prefill"
    assert reader.probe(probe.id) == probe
    assert list(reader.probes_of_runs(kind="exact")) == [probe]
    with pytest.raises(Rejected, match="probe"):
        reader.attribution("my-run", 5)


def test_lint_corrections_and_theory(reader: Any) -> None:
    lint = reader.lint("my-run", 20)
    assert (lint.step, lint.attempt, lint.rollouts) == (20, 1, 8)
    assert {check.name for check in lint.checks} >= {warning.name for warning in lint.warnings}
    of_run = reader.lint_of_run("my-run")
    assert of_run.checked_steps == 30
    assert of_run.clean_steps <= 30
    corrections = reader.corrections("my-run", 20, names=["token_tis"], thresholds=["2", "3"])
    assert [item.threshold for item in corrections.items] == ["2", "3"]
    assert all(0 < item.ess <= 1 and item.affected.untouched.sequences <= 8 for item in corrections.items)
    assert len(reader.corrections("my-run", 20).items) > 2
    theory = reader.theory("my-run", 20, delta_max=0.25)
    assert theory.horizon.delta_max == 0.25
    assert theory.bias.sequences <= 8
    assert math.isnan(reader.theory("my-run", 20).horizon.value)
    with pytest.raises(Rejected, match="exact"):
        reader.exact("my-run", 20)
    with pytest.raises(Rejected, match="exact"):
        reader.exact_tokens("my-run", 20, count=3)


def test_curves_that_have_not_changed_are_not_sent_again(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    original = RememberedAnswers.body

    def noted(held: RememberedAnswers, request: object, response: httpx.Response) -> bytes:
        statuses.append(response.status_code)
        return original(held, request, response)

    monkeypatch.setattr(RememberedAnswers, "body", noted)
    curve, again = (reader.measurements("my-run", measures=["k3_kl"]).columns["k3_kl"] for _ in range(2))
    assert np.array_equal(curve, again, equal_nan=True)
    assert statuses == [200, 304]


def test_long_polls_end_at_a_change_or_after_the_time(made: Made, open_reader: Callable[..., Any]) -> None:
    reader = open_reader(made.url)
    # Nobody decides on a run that has ended.
    httpx.patch(f"{made.url}/v1/runs/{made.run}", json={"state": "running"}, timeout=60).raise_for_status()
    begin = time.monotonic()
    # The first call does not wait.
    advice, alerts = reader.advice("my-run", wait_seconds=30), reader.changed_alerts("my-run", wait_seconds=30)
    assert time.monotonic() - begin < 25
    assert {alert.id for alert in alerts} == {alert.id for alert in reader.alerts("my-run")}
    assert reader.advice("my-run", wait_seconds=0.3) == advice
    assert reader.changed_alerts("my-run", wait_seconds=0.3) == alerts
    assert time.monotonic() - begin >= 0.6
    # The run is that of both readers.
    body = {"kind": "release" if advice.advice.phase == "held" else "hold", "reason": "a test"}
    url = f"{made.url}/v1/runs/{made.run}/lr-advice/decisions"
    deciding = threading.Timer(0.5, lambda: httpx.post(url, json=body, timeout=60))
    deciding.start()
    changed = reader.advice("my-run", wait_seconds=30)
    deciding.join()
    assert changed.advice.revision > advice.advice.revision
    httpx.patch(f"{made.url}/v1/runs/{made.run}", json={"state": "finished"}, timeout=60).raise_for_status()


def test_remembered_answers_are_bounded() -> None:
    held = RememberedAnswers(most_bytes=100)

    def answer(body: bytes, tag: str | None = '"a"', status: int = 200) -> httpx.Response:
        return httpx.Response(status, content=body, headers={} if tag is None else {"ETag": tag})

    for number in range(5):
        assert held.body(number, answer(bytes(25), f'"{number}"')) == bytes(25)
    # Four of 25 bytes fit; the one that was used longest ago is gone.
    assert [held.headers(number) for number in range(5)] == [
        {}, *({"If-None-Match": f'"{number}"'} for number in range(1, 5))
    ]  # fmt: skip
    assert held.body(1, answer(b"", status=304)) == bytes(25)
    held.body("new", answer(b"new"))
    assert held.headers(1)
    assert not held.headers(2)
    held.body("large", answer(bytes(26)))
    held.body(1, answer(b"untagged", None))
    assert not held.headers("large")
    assert not held.headers(1)
    with pytest.raises(ValueError, match="304"):
        held.body("unknown", answer(b"", status=304))


def test_invalid_names_are_refused_by_the_service_with_what_exists(reader: Any) -> None:
    with pytest.raises(Rejected, match="did you mean 'k3_kl'") as raised:
        reader.measurements("my-run", measures=["k3_k"])
    assert raised.value.status == 422
    with pytest.raises(TypeError, match=r"measures takes several names, such as \['k3_kl'\]"):
        reader.measurements("my-run", measures="k3_kl")


def test_run_key_with_a_slash_is_one_segment(reader: Any) -> None:
    with pytest.raises(RunNotFound, match="a/b"):
        reader.run("a/b")


def blocks_of_page(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", READING, re.DOTALL)


@pytest.mark.parametrize("code", blocks_of_page("python"))
def test_python_of_the_page_runs(made: Made, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code.replace(ADDRESS, made.url), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize("commands", blocks_of_page("bash"))
def test_commands_of_the_page_run(made: Made, commands: str, tmp_path: Path) -> None:
    strict = "set -euo pipefail\n" + commands.replace(ADDRESS, made.url)
    # One of them writes a file.
    subprocess.run(["bash", "-c", strict], check=True, capture_output=True, timeout=60, cwd=tmp_path)


def curls_of_other_pages() -> list[str]:
    """Return the curl commands of every other document, with the lines that continue them."""
    pages = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
    texts = [REST, *(page.read_text() for page in pages if page != PAGE)]
    return [command for text in texts for command in re.findall(r"^curl (?:.*\\\n)*.*$", text, re.MULTILINE)]


def test_curl_commands_of_other_pages_run(made: Made, tmp_path: Path) -> None:
    (tmp_path / "my-rules.toml").write_text("version = 1\neffective_from_step = 40\n")
    environment = os.environ | {"FORESHOCK_URL": made.url, "RUN": made.run, "KEY": "fsk_none"}
    commands = curls_of_other_pages()
    assert commands
    for command in commands:
        failing = command.replace("curl ", "curl -sSf ", 1).replace(ADDRESS, made.url)
        done = subprocess.run(["bash", "-c", failing], capture_output=True, timeout=60, cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
        assert done.stdout, command


def test_page_names_every_method_of_readers_and_operators() -> None:
    methods = re.findall(r"^\| [^|]* \| ([^|]*) \|", READING, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(methods)))
    assert named == {*described_methods(Reader), *described_methods(Operator)}


def test_client_has_a_reader_of_its_project(made: Made, tmp_path: Any) -> None:
    client = foreshock.Client(made.url, "elsewhere", "second", spool_directory=tmp_path)
    with client.reader() as reader:
        assert reader.scalars(client.run_key).curve("x")[1].tolist() == [1.0]
    client.close()


def test_busy_service_is_asked_again(open_reader: Callable[..., Any]) -> None:
    with faulty_service(faults=deque([503, 429, "reset"])) as service:
        reader = open_reader(service.url, retry_seconds=30)
        assert reader.export_scalars("my-run", "csv") == b'{"status": "stored"}'
        assert service.requests == 4


def test_absent_service_is_an_error_after_the_retries(open_reader: Callable[..., Any]) -> None:
    reader = open_reader(f"http://127.0.0.1:{free_port()}", retry_seconds=0.2)
    with pytest.raises(ServiceUnavailable, match="check that the service runs"):
        list(reader.runs())


def test_answer_of_another_kind_is_a_wrong_service_and_not_asked_again(open_reader: Callable[..., Any]) -> None:
    with faulty_service(always="html") as service:
        with pytest.raises(WrongService, match="is not a Foreshock service"):
            list(open_reader(service.url).runs())
        assert service.requests == 1


def test_answer_without_a_needed_field_is_a_wrong_service() -> None:
    listing: Listing[Any] = Reader.steps.request("my-run")
    with pytest.raises(KeyError, match="StepRecord lacks attempt"):
        listing.page(None).read(b'{"items": [{"step": 1}]}')
