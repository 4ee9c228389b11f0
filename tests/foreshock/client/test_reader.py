"""The reader against the real service: every method gives what the plain HTTP answer has."""

import io
import math
import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest

import foreshock
from foreshock import Reader
from foreshock.api.doctor import DoctorReport, Finding, NotTried
from foreshock.api.records import Record, to_json
from foreshock.api.watch import AdviceRecord, advice_record
from foreshock.client.columns import Buckets, Columns, Measurements, Scalars, Tokens
from foreshock.errors import Rejected, RunNotFound, ServiceUnavailable, WrongService
from foreshock.json_values import json_value
from foreshock.probe_kinds import DOCTOR
from foreshock.rollouts import decode_rollouts
from tests.foreshock.batches import random_batch
from tests.foreshock.client.faulty_service import faulty_service
from tests.foreshock.running_service import RunningService
from tests.paths import DOCS, REPOSITORY
from tests.ports import free_port
from tests.service.working import EVERYTHING, LeaseHolder, ask_for_lease, noisy, scores_of

PAGE = DOCS / "api.md"
READING, _, REST = PAGE.read_text().partition("## Address a run")
ADDRESS = "http://127.0.0.1:8765"
STEPS = list(range(1, 31))
DIGEST = "sha256:" + "0" * 64
STEP = "/v1/runs/my-run/steps/20"


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
    with httpx.Client(base_url=real_service.url, timeout=60) as http, Reader(real_service.url) as reader:
        reader.request_probe(run, 20, scorers=["vllm.prefill", "torch.trainer"])
        reader.examine_step(run, 20)
        while (answer := ask_for_lease(http, scorers=(*EVERYTHING, DOCTOR.capability))).status_code == 200:
            _work(LeaseHolder(http, answer.json()))
    return Made(real_service.url, run)


def _work(holder: LeaseHolder) -> None:
    rollouts, job = holder.rollouts(), holder.lease["job"]
    if job["kind"] == DOCTOR.name:
        found = Finding("unknown", "rollout", "unknown", "", "no variant", 1, 1)
        report = DoctorReport(8, rollouts.num_tokens, (found,), (), (), (NotTried("step 1", "gone"),), 3, 1.5, "spent")
        headers = {"X-Foreshock-Lease-Token": str(holder.token)}
        holder.http.put(f"{holder.url}/doctor", json=to_json(report), headers=headers).raise_for_status()
    for each in job["scorers"] if job["kind"] != DOCTOR.name else ():
        scores = scores_of(rollouts, noisy(rollouts, len(each["scorer"])), engine=each["scorer"].partition(".")[0])
        holder.put_scores(scores, each["scorer"], variant=each["variant"]).raise_for_status()
    holder.complete().raise_for_status()


@pytest.fixture
def reader(made: Made) -> Iterator[Reader]:
    """A reader of all projects."""
    with Reader(made.url) as reader:
        yield reader


QUESTIONS: dict[str, tuple[Callable[[Reader], Any], str]] = {
    "runs": (
        lambda reader: reader.runs(states=["finished", "running"], search="Y-R", model="M"),
        "/v1/runs?state=finished&state=running&search=Y-R&model=M",
    ),
    "run": (lambda reader: reader.run("my-run"), "/v1/runs/my-run"),
    "attempts": (lambda reader: reader.attempts("my-run"), "/v1/runs/my-run/attempts"),
    "steps": (lambda reader: reader.steps("my-run", attempt=1), "/v1/runs/my-run/steps?attempt=1"),
    "changes": (lambda reader: reader.changes("my-run"), "/v1/runs/my-run/changes"),
    "weights": (lambda reader: reader.weights("my-run"), "/v1/runs/my-run/weights"),
    "checkpoints": (lambda reader: reader.checkpoints("my-run"), "/v1/runs/my-run/checkpoints"),
    "measures": (lambda reader: reader.measures(), "/v1/measures"),
    "measurements": (
        lambda reader: reader.measurements(
            "my-run", measures=["k3_kl"], comparisons=["trainer/rollout"], from_step=5, to_step=24, max_points=6
        ),
        "/v1/runs/my-run/measurements?measure=k3_kl&comparison=trainer/rollout&from_step=5&to_step=24&max_points=6",
    ),
    "scalars": (
        lambda reader: reader.scalars("my-run", names=["odd", "grad_norm"], sources=["trainer"], from_step=5),
        "/v1/runs/my-run/scalars?name=odd&name=grad_norm&source=trainer&from_step=5",
    ),
    "buckets": (lambda reader: reader.buckets("my-run", 20, by="position"), f"{STEP}/buckets?by=position"),
    "worst_tokens": (lambda reader: reader.worst_tokens("my-run", 20, count=3), f"{STEP}/tokens?worst=3"),
    "rollout_tokens": (
        lambda reader: reader.rollout_tokens("my-run", 20, _sample(reader), from_position=1, to_position=2),
        f"{STEP}/tokens?sample_id={{sample}}&from_position=1&to_position=2",
    ),
    "export_rollouts": (lambda reader: reader.export_rollouts("my-run", 20), f"{STEP}/rollouts"),
    "lint": (lambda reader: reader.lint("my-run", 20), f"{STEP}/lint"),
    "corrections": (
        lambda reader: reader.corrections("my-run", 20, names=["token_tis"], thresholds=["2", "3"]),
        f"{STEP}/corrections?correction=token_tis&threshold=2&threshold=3",
    ),
    "theory": (
        lambda reader: reader.theory("my-run", 20, delta_max=0.5, gradient_bound=2.0),
        f"{STEP}/theory?delta_max=0.5&gradient_bound=2.0",
    ),
    "attribution": (lambda reader: reader.attribution("my-run", 20), f"{STEP}/attribution"),
    "exact": (lambda reader: reader.exact("my-run", 20), f"{STEP}/exact"),
    "routing": (lambda reader: reader.routing("my-run", 20), f"{STEP}/routing"),
    "layers": (lambda reader: reader.layers("my-run", 20), f"{STEP}/layers"),
    "doctor": (lambda reader: reader.doctor("my-run", 20), f"{STEP}/doctor"),
    "diagnosis": (lambda reader: reader.diagnosis("my-run"), "/v1/runs/my-run/diagnosis"),
    "findings": (
        lambda reader: reader.findings("my-run", severities=["warning", "critical"]),
        "/v1/runs/my-run/findings?severity=warning&severity=critical",
    ),
    "findings of all runs": (lambda reader: reader.findings(sources=["lint"]), "/v1/findings?source=lint"),
    "alerts": (
        lambda reader: reader.alerts("my-run", states=["open", "resolved"]),
        "/v1/runs/my-run/alerts?state=open&state=resolved",
    ),
    "alerts_of_runs": (lambda reader: reader.alerts_of_runs(severities=["critical"]), "/v1/alerts?severity=critical"),
    "rules": (lambda reader: reader.rules(model_kind="moe"), "/v1/rules?model_kind=moe"),
    "advice": (lambda reader: reader.advice("my-run", step=31), "/v1/runs/my-run/advice?step=31"),
    "decisions": (lambda reader: reader.decisions("my-run"), "/v1/runs/my-run/lr-advice/decisions"),
    "probes": (lambda reader: reader.probes("my-run", step=20), "/v1/runs/my-run/probes?step=20"),
    "probe": (lambda reader: reader.probe(_probe(reader)), "/v1/probes/{probe}"),
    "hardware": (lambda reader: reader.hardware(), "/v1/hardware"),
}
CHANGES = {"set_advice_mode", "hold", "halve", "request_probe", "examine_step", "delete_run"}
NOT_DONE = {"exact", "routing", "layers"}
"""Replays that the run lacks: tests/probes has readers of real ones."""


def _sample(reader: Reader) -> str:
    return str(reader.worst_tokens("my-run", 20, count=1).columns["sample_id"][0])


def _probe(reader: Reader) -> str:
    return next(reader.probes("my-run")).id


def plain(answer: Any) -> Any:
    """Return an answer of the reader as JSON has it."""
    match answer:
        case Measurements() | Scalars() | Buckets():
            return plain(answer.columns)
        case Columns():
            return {name: json_value(column.tolist()) for name, column in answer.items()}
        case Tokens():
            rows = plain(answer.columns)
            return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        case Record():
            return to_json(answer)
        case bytes() | AdviceRecord():
            return answer
    return [plain(item) for item in answer]


def part_of(answer: Any, response: httpx.Response) -> Any:
    """Return the part of an HTTP answer that `plain` returns of the reader's."""
    match answer:
        case bytes():
            return response.content
        case AdviceRecord():
            return advice_record(response.json())
        case Measurements() | Scalars() | Buckets():
            return response.json()["columns"]
        case Tokens() | Iterator() | tuple():
            items = response.json()["items"]
            return (
                [{name: item[name] for name in answer.columns} for item in items]
                if isinstance(answer, Tokens)
                else items
            )
    return response.json()


@pytest.mark.parametrize("name", QUESTIONS)
def test_method_returns_the_plain_answer(reader: Reader, name: str) -> None:
    call, path = QUESTIONS[name]
    path = path.format(sample=_sample(reader), probe=_probe(reader))
    response = httpx.get(reader.connection.url + path, timeout=60)
    if name in NOT_DONE:
        with pytest.raises(Rejected) as raised:
            call(reader)
        problem = {**response.json(), "request_id": raised.value.problem["request_id"]}
        assert (raised.value.status, raised.value.problem) == (404, problem)
        return
    answer = call(reader)
    assert plain(answer) == part_of(answer, response.raise_for_status())


def test_every_method_is_tested_and_on_the_page() -> None:
    methods = {name for name, each in vars(Reader).items() if callable(each) and not name.startswith("_")}
    assert len(methods) <= 40
    assert methods - {"close"} == {name for name in QUESTIONS if " " not in name} | CHANGES
    columns = re.findall(r"^\| [^|]* \| ([^|]*) \|", READING, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(columns))) == methods - {"close"}


def test_changes_of_a_person(made: Made, tmp_path: Path) -> None:
    with (
        foreshock.Client(made.url, run_key="to change", spool_directory=tmp_path, strict=True) as client,
        Reader(made.url, "default") as reader,
    ):
        client.log_checkpoint(7, root="weights", path="step-7", digest=DIGEST)
        client.log_rollouts(7, random_batch(7))
        assert client.flush(60)
        assert reader.set_advice_mode("to change", "apply").advice_mode == "apply"
        assert reader.halve("to change", "the reward fell").advised_scale == 0.5
        assert reader.hold("to change", "a look first").advice.phase == "held"
        with pytest.raises(Rejected, match="409") as raised:
            reader.hold("to change", "again")
        assert raised.value.problem["detail"]
        log = [(each.kind, each.reason, each.author) for each in reader.decisions("to change") if each.kind != "mode"]
        assert log == [("halve", "the reward fell", "operator"), ("hold", "a look first", "operator")]
        scorers = ["vllm.prefill", "vllm.prefill@rebatched"]
        probe = reader.request_probe("to change", 7, scorers=scorers, options={"vllm.prefill": {"enforce_eager": True}})
        assert [(each.scorer, each.variant) for each in probe.scorers] == [
            ("vllm.prefill", ""), ("vllm.prefill", "rebatched")
        ]  # fmt: skip
        assert probe.options == {"vllm.prefill": {"enforce_eager": True}}
        search = reader.examine_step("to change", 7, budget_seconds=5.0)
        assert {each.id for each in reader.probes("to change")} == {probe.id, search.id}
        reader.delete_run(reader.run("to change").id)
        with pytest.raises(Rejected, match="410"):
            reader.hold(str(client.run_id), "gone")


def test_columns_are_numpy_arrays_and_a_data_frame(reader: Reader) -> None:
    pandas = pytest.importorskip("pandas")
    measured = reader.measurements("my-run")
    steps, k3 = measured.curve("trainer/rollout", "k3_kl")
    assert steps.dtype == np.int64
    assert k3.dtype == np.float64
    assert measured.columns["from_sample"].dtype == np.bool_
    assert k3[steps == 20] > 10 * k3[steps == 6]
    frame = pandas.DataFrame(measured.columns)
    assert list(frame.columns) == list(measured.columns)
    assert frame["k3_kl"].to_numpy() == pytest.approx(measured.columns["k3_kl"], nan_ok=True)
    odd = reader.scalars("my-run", names=["odd"])
    assert np.isnan(odd.curve("odd", "trainer")[1]).tolist() == [step % 2 == 1 for step in STEPS]
    with pytest.raises(KeyError, match="did you mean 'k3_kl'"):
        measured.columns["k3_lk"]
    buckets = reader.buckets("my-run", 20)
    assert len(buckets.edges) == buckets.columns.rows + 1
    assert np.all(np.diff(buckets.edges) > 0)
    worst = reader.worst_tokens("my-run", 20, count=3)
    assert worst.columns["d"] == pytest.approx(worst.log_probs["trainer"] - worst.log_probs["rollout"])
    file = reader.export_rollouts("my-run", 20)
    assert pq.read_table(io.BytesIO(file)).num_rows == decode_rollouts(file).num_rollouts == 8


def test_every_page_of_a_list_is_read(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock.client.reader.ITEMS_ON_A_PAGE", 7)
    assert [step.step for step in reader.steps("my-run")] == STEPS


def test_project_of_the_reader_bounds_every_list_and_key(made: Made, tmp_path: Path) -> None:
    with foreshock.Client(made.url, "elsewhere", "second", spool_directory=tmp_path) as client:
        elsewhere = client.reader()
    assert [run.key for run in elsewhere.runs()] == ["second"]
    assert list(elsewhere.alerts_of_runs()) == []
    assert list(elsewhere.findings()) == []
    assert elsewhere.scalars("second").curve("x")[1].tolist() == [1.0]
    with pytest.raises(RunNotFound):
        elsewhere.run("my-run")
    elsewhere.close()


def test_invalid_names_are_refused_with_what_exists(reader: Reader) -> None:
    with pytest.raises(Rejected, match="did you mean 'k3_kl'") as raised:
        reader.measurements("my-run", measures=["k3_k"])
    assert raised.value.status == 422
    with pytest.raises(TypeError, match=r"measures takes several names, such as \['k3_kl'\]"):
        reader.measurements("my-run", measures="k3_kl")
    with pytest.raises(RunNotFound, match="a/b"):
        reader.run("a/b")


def test_busy_service_is_asked_again() -> None:
    with faulty_service(faults=deque([503, 429, "reset"])) as service, Reader(service.url, retry_seconds=30) as reader:
        assert reader.export_rollouts("my-run", 1) == b'{"status": "stored"}'
        assert service.requests == 4


@pytest.mark.parametrize("fault", [503, "reset", "half"])
def test_change_is_sent_once(fault: Any) -> None:
    with faulty_service(faults=deque([fault])) as service, Reader(service.url, retry_seconds=30) as reader:
        with pytest.raises(ServiceUnavailable):
            reader.halve("my-run", "once")
        assert service.requests == 1


def test_absent_service_is_an_error_after_the_retries() -> None:
    with (
        Reader(f"http://127.0.0.1:{free_port()}", retry_seconds=0.2) as reader,
        pytest.raises(ServiceUnavailable, match="check that the service runs"),
    ):
        list(reader.runs())


def test_answer_of_another_kind_is_a_wrong_service_and_not_asked_again() -> None:
    with faulty_service(always="html") as service, Reader(service.url) as reader:
        with pytest.raises(WrongService, match="is not a Foreshock service"):
            list(reader.runs())
        assert service.requests == 1


def test_answer_without_a_needed_field_is_a_wrong_service() -> None:
    with (
        faulty_service() as service,
        Reader(service.url) as reader,
        pytest.raises(WrongService, match="RunRecord lacks"),
    ):
        reader.run("my-run")


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
    environment = os.environ | {"FORESHOCK_URL": made.url, "RUN": made.run, "KEY": "fsk_none"}
    commands = curls_of_other_pages()
    assert commands
    for command in commands:
        failing = command.replace("curl ", "curl -sSf ", 1).replace(ADDRESS, made.url)
        done = subprocess.run(["bash", "-c", failing], capture_output=True, timeout=60, cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
        assert done.stdout, command
