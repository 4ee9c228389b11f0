"""Tests of the commands with the real service: import, runs, report, watch and probe."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock.client.reader import Reader
from foreshock.commands.main import main
from foreshock.commands.queries import find_run
from foreshock.commands.text import WIDTH, Paint
from foreshock.commands.watch import _Watch
from foreshock.digests import weights_digest
from foreshock.rollouts import encode_rollouts
from foreshock.scorers import EXACT_PAIRS, default_scorers
from tests.foreshock.batches import random_batch
from tests.foreshock.running_service import RunningService

STEPS = range(1, 31)


def batch_of(step: int) -> Any:
    return random_batch(step, rollouts=16, largest=3.0 if 17 <= step < 23 else 0.1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    (folder / "rollouts").mkdir(parents=True)
    for step in STEPS:
        (folder / "rollouts" / f"step_{step:04d}.parquet").write_bytes(encode_rollouts(batch_of(step)))
    lines = [json.dumps({"step": step, "grad_norm": 0.5 + step}) for step in STEPS]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    checkpoint = folder / "checkpoints" / "step_0020"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    (checkpoint / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def imported(recorded: Path, real_service: RunningService) -> RunningService:
    assert run(real_service, *import_words(recorded)) == 0
    return real_service


def import_words(folder: Path) -> list[str]:
    described = ["--run-key", "imported", "--model", "M", "--model-kind", "dense"]
    return ["import", str(folder), *described, "--weights-root", f"recorded={folder.parent}"]


@pytest.fixture(autouse=True)
def _own_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_SPOOL_DIRECTORY", str(tmp_path / "spool"))


def run(service: RunningService, *words: str) -> int:
    return main([*words, "--url", service.url])


def test_imported_run_is_complete(imported: RunningService, capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    assert run(imported, "runs", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("key", "model", "model_kind", "state", "last_step")} == {
        "key": "imported", "model": "M", "model_kind": "dense", "state": "finished", "last_step": 30,
    }  # fmt: skip
    url = f"{imported.url}/v1/runs/{found['id']}"
    assert len(httpx.get(f"{url}/scalars", timeout=60).json()["columns"]["value"]) == len(STEPS)
    (checkpoint,) = httpx.get(f"{url}/checkpoints", timeout=60).json()["items"]
    folder = recorded / "checkpoints" / "step_0020"
    assert (checkpoint["root"], checkpoint["path"]) == ("recorded", "run/checkpoints/step_0020")
    assert checkpoint["digest"] == weights_digest(folder)


def test_importing_twice_is_safe(imported: RunningService, capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    assert run(imported, *import_words(recorded)) == 0
    assert "30 steps (1 to 30) with 480 rollouts imported, 30 shards of them already stored" in capsys.readouterr().out


def test_importing_other_rollouts_under_the_same_key_is_rejected(
    imported: RunningService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "step_0001.parquet").write_bytes(encode_rollouts(random_batch(99)))
    assert run(imported, "import", str(tmp_path), "--run-key", "imported") == 1
    assert "1 item rejected by the service" in capsys.readouterr().err


def test_empty_file_makes_no_run(imported: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_0001.parquet").write_bytes(b"")
    assert run(imported, "import", str(tmp_path), "--run-key", "nothing") == 1
    assert "step_0001.parquet is empty or cut off: expected a Parquet file" in capsys.readouterr().err
    assert run(imported, "runs", "--json") == 0
    assert [each["key"] for each in json.loads(capsys.readouterr().out)].count("nothing") == 0


def test_import_that_fails_after_its_first_file_fails_its_run(
    real_service: RunningService, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step_0001.parquet", "step_0002.parquet"):
        (tmp_path / name).write_bytes((recorded / "rollouts" / name).read_bytes())
    (tmp_path / "step_0002.parquet").write_bytes(b"PAR1")
    words = ["import", str(tmp_path), "--run-key", "half imported"]
    for unfinished, state in ((["--unfinished"], "running"), ([], "failed")):
        assert run(real_service, *words, *unfinished) == 1
        with Reader(real_service.url) as reader:
            found = find_run(reader, "half imported")
            assert found.state == state
    assert "the same command continues it" in capsys.readouterr().err
    with httpx.Client(base_url=real_service.url, timeout=60) as http:
        http.delete(f"/v1/runs/{found.id}").raise_for_status()


def test_runs_are_listed(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(imported, "runs") == 0
    header, line, headline = capsys.readouterr().out.splitlines()
    assert re.split(r" {2,}", header) == ["run", "verdict", "since", "step", "state", "open alerts"]
    assert re.match(r"imported  (critical|warning) +\d+ +30  finished  \d+ (crit|warn|info)", line)
    assert re.match(r"  (Mismatch|Warning|Critical).* since step ", headline)
    assert max(map(len, (header, line, headline))) <= 82
    assert run(imported, "runs", "--project", "nobody's") == 0
    assert "no runs yet" in capsys.readouterr().out


def test_report_as_json_has_diagnosis_and_alerts(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(imported, "report", "imported", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run"]["key"] == "imported"
    assert report["diagnosis"]["headline"] == report["run"]["diagnosis"]["headline"]
    assert report["advice"]["advice"]["mode"] == "shadow"
    assert {alert["rule"] for alert in report["alerts"]}


def test_report_is_one_screen_unless_asked(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(imported, "report") == 0, "the newest run is the default"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert not [line for line in lines if len(line) > WIDTH and " since step " not in line]
    titles = [lines.index(f"  {title}") for title in ("What happened, in order", "What to do")]
    assert titles == sorted(titles)
    drawn = [line.split("  ")[1] for line in lines if "▁" in line]
    k3 = "Mismatch, k3 of all tokens"
    assert drawn == ["Reward", k3, "Response length", "Entropy", "Gradient norm"]
    assert any(line.startswith("  learning rate: scale ") and "; mode shadow (" in line for line in lines)
    assert lines[-2:] == [
        "Tables of steps, links, probes and alerts: --full",
        f"Pages: {imported.url}/runs/default/imported",
    ]
    assert not any(line.startswith("Where the mismatch comes from") for line in lines)
    assert run(imported, "report", "imported", "--step", "17") == 0
    text = capsys.readouterr().out
    assert "\nWhere the mismatch comes from" in text
    assert "\nMeasures of trainer/rollout, step 17 ─" in text
    assert text.endswith("/runs/default/imported/steps/17\n")
    assert "\x1b" not in text


def test_page_of_run_is_one_file(imported: RunningService, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    assert run(imported, "report", "imported", "--html", str(file)) == 0
    assert not capsys.readouterr().out
    page = file.read_text()
    assert page.startswith("<!doctype html>")
    assert f'href="{imported.url}/runs/default/imported"' in page
    assert run(imported, "report", "imported", "--html", str(file), "--json") == 1
    assert "--html writes the page of the run" in capsys.readouterr().err
    assert run(imported, "report", "imported", "--html", str(tmp_path / "missing" / "run.html")) == 1
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_watch_prints_steps_and_alerts(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(imported, "watch", "imported", "--from-step", "15") == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1]) for line in lines] == list(range(15, 31))
    assert all(len(line) <= WIDTH + 5 for line in lines)
    assert all(float(line.split("|d| ")[1].split()[0]) > 0.0 for line in lines)
    (sparklines,) = (line for line in text.splitlines() if line.startswith("  k3 "))
    assert len(sparklines) <= WIDTH
    assert sparklines.split()[0::2] == ["k3", "length", "reward"]
    assert "█" in sparklines.split()[1]
    assert re.search(r"^(Critical|Warning) since step \d+: ", text, re.MULTILINE)
    # These rollouts lag behind the trainer: only relative rules can fire.
    assert "\nWARNING at step " in text
    assert "\n     → " in text
    assert text.splitlines()[-1] == "the run is finished"


@pytest.mark.parametrize(("first", "says"), [(30, False), (31, True), (9999, True)])
def test_watch_beyond_the_end_names_the_newest_step(
    imported: RunningService, capsys: pytest.CaptureFixture[str], first: int, says: bool
) -> None:
    assert run(imported, "watch", "imported", "--from-step", str(first), "--once") == 0
    text = capsys.readouterr().out
    assert (f"no step from {first} on: the run has newest step 30\n" in text) == says
    assert ("\nstep 30 " in text) == (not says)
    with httpx.Client(base_url=imported.url, timeout=60) as http:
        http.post("/v1/runs", json={"key": "empty"}).raise_for_status()
    assert run(imported, "watch", "empty", "--from-step", str(first), "--once") == 0
    assert f"no step from {first} on: the run has no step yet\n" in capsys.readouterr().out


def test_watch_prints_steps_that_are_repeated(real_service: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    with Reader(real_service.url) as reader, httpx.Client(base_url=real_service.url) as http:
        address = f"/v1/runs/{http.post('/v1/runs', json={'key': 'resumed'}).raise_for_status().json()['id']}"
        watch = _Watch(reader, address.rpartition("/")[2], Paint(), None, 2, 2)

        def printed(attempt: int, resume_step: int, steps: range) -> list[str]:
            body = {"key": f"of {attempt}", "resume_step": resume_step}
            http.post(f"{address}/attempts", json=body).raise_for_status()
            for step in steps:
                values = {"reward": attempt + step / 10}
                where = f"{address}/steps/{step}/scalars?attempt={attempt}"
                http.put(where, json={"values": values}).raise_for_status()
            watch.print_new(find_run(reader, "resumed"), is_last=True)
            lines = capsys.readouterr().out.splitlines()
            words = [line.split() for line in lines if line.startswith(("step", "attempt"))]
            return [" ".join(each if each[0] == "attempt" else [each[1], each[-3]]) for each in words]

        assert printed(1, 0, range(5)) == ["2 1.20", "3 1.30", "4 1.40"]
        assert printed(2, 3, range(3, 5)) == ["attempt 2 begins at step 3", "3 2.30", "4 2.40"]
        assert printed(3, 5, range(5, 6)) == ["5 3.50"]
        assert printed(4, 0, range(1)) == ["attempt 4 begins at step 0"]
        assert printed(4, 0, range(1, 4)) == ["2 4.20", "3 4.30"]


def test_run_of_scalars_is_watched_and_shown(real_service: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"key": "scalars", "model": "M", "model_kind": "dense", "scalar_names": {"reward": "my/score"}}
    with httpx.Client(base_url=real_service.url, timeout=60) as http:
        address = f"/v1/runs/{http.post('/v1/runs', json=body).raise_for_status().json()['id']}"
        http.post(f"{address}/attempts", json={"key": "first"}).raise_for_status()
        for step in range(20):
            values = {"my/score": step / 20, "reward": -1.0, "entropy": 1.5}
            http.put(f"{address}/steps/{step}/scalars", json={"values": values}).raise_for_status()
        values = {"reward": -2.0, "my/score": 0.25}
        http.put(f"{address}/steps/19/scalars", json={"source": "evaluation", "values": values}).raise_for_status()
        assert run(real_service, "watch", "scalars", "--once") == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        assert [int(line[1]) for line in lines] == list(range(10, 20))
        rewards = [line[line.index("reward") + 1] for line in lines]
        assert (rewards[0], rewards[-1]) == ("0.500", "0.950")
        assert [line[-1] for line in lines] == ["1.50"] * 10
    for words in ((), ("--full",)):
        assert run(real_service, "report", "scalars", *words) == 0
        text = capsys.readouterr().out
        assert "20 steps (0 to 19) of scalars, no rollouts yet; newest data" in text
        assert re.search(r"Reward +\S+ +.*0\.95", text), text
        assert "no step is complete yet" not in text
    assert run(real_service, "report", "scalars", "--step", "5") == 1
    assert "the run has no rollouts of step 5" in capsys.readouterr().err


def test_repeated_request_finds_the_same_probe(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["probe", "imported", "20", "--scorer", "torch.trainer", "--scorer", "torch.float32@rebatched"]
    options = ["--trainer-autocast", "none", "--trainer-master-dtype", "bfloat16", "--max-rollouts", "8"]
    assert run(imported, *words, *options, "--no-wait", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert run(imported, *words, *options, "--no-wait", "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == first["id"]
    assert first["step"] == 20
    assert {(item["scorer"], item["variant"]) for item in first["scorers"]} == {
        ("torch.trainer", ""), ("torch.float32", "rebatched"),
    }  # fmt: skip
    assert first["options"] == {"torch.trainer": {"autocast": None, "master_dtype": "bfloat16"}}
    assert run(imported, *words, *options, "--timeout", "0.6") == 1
    shown = capsys.readouterr()
    assert "queued" in shown.out
    assert "foreshock worker" in shown.err
    assert run(imported, "report", "imported", "--full") == 0
    assert "probe of step 20: queued" in capsys.readouterr().out


def test_probe_that_no_live_worker_can_do_ends_before_its_timeout(
    imported: RunningService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreshock.commands.probe._WORKER_SECONDS", 0.0)
    assert run(imported, "probe", "imported", "20", "--scorer", "torch.float32", "--timeout", "500") == 1
    assert "the probe stays queued: no live worker can do it; start one with" in capsys.readouterr().err


def test_cancelled_probe_is_shown_with_its_reason(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(imported, "probe", "imported", "20", "--scorer", "torch.bfloat16", "--no-wait", "--json") == 0
    probe = json.loads(capsys.readouterr().out)["id"]
    assert run(imported, "probe", "imported", probe) != 0
    assert f"foreshock probe cancel {probe}" in capsys.readouterr().err
    assert run(imported, "probe", "cancel", probe) == 0
    assert "skipped" in (shown := capsys.readouterr().out)
    assert "the probe was cancelled" in shown
    assert run(imported, "probe", "cancel", "probe_none") == 1
    assert "there is no probe probe_none" in capsys.readouterr().err


def test_exact_probe_asks_for_pair_and_scorers(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["probe", "imported", "20", "--exact", "--no-wait"]
    assert run(imported, *words, "--json") == 0
    probe = json.loads(capsys.readouterr().out)
    assert probe["exact_pairs"] == list(EXACT_PAIRS)
    assert [each["scorer"] for each in probe["scorers"]] == sorted(default_scorers())
    assert run(imported, *words) == 0
    assert "exact(torch.trainer, vllm.prefill)" in capsys.readouterr().out


def test_probe_without_weights_shows_the_reason(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(imported, "probe", "imported", "7", "--timeout", "1")
    shown = capsys.readouterr()
    assert status == 1
    assert "no checkpoint is announced for step 7 of attempt 1 (the newest that are: 20)" in shown.err
    assert "log_checkpoint(step, root=…, path=…)" in shown.err
    assert not re.search(r"\b(GET|PUT|POST)\b|/v1/", shown.err)


def test_commands_take_a_key_and_suggest_another(imported: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    with httpx.Client(base_url=imported.url, timeout=60) as http:
        for project in ("a", "b"):
            http.post("/v1/runs", json={"key": "team/nightly", "project": project}).raise_for_status()
    assert run(imported, "report", "team/nightly") == 1
    assert "several projects have a run team/nightly: add --project with one of a, b" in capsys.readouterr().err
    assert run(imported, "report", "team/nightly", "--project", "b") == 0
    assert f"{imported.url}/runs/b/team%2Fnightly" in capsys.readouterr().out
    assert run(imported, "report", "nothing") == 1
    assert "no run with the id, key or name 'nothing'" in capsys.readouterr().err
    assert run(imported, "report", "team/nightli") == 1
    assert "did you mean 'team/nightly'?" in capsys.readouterr().err
