"""`foreshock import --format` and `--follow` with the real service."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock import Reader
from foreshock.commands.main import main
from foreshock.errors import ConfigurationError
from tests.foreshock.importers.make_dumps import DUMPS
from tests.foreshock.importers.reading import FOLDERS, figures, measures, read
from tests.foreshock.running_service import RunningService
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _own_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_SPOOL_DIRECTORY", str(tmp_path / "cache" / "spool"))


def run(service: RunningService, *words: str) -> int:
    return main(["import", *words, "--url", service.url])


def run_named(service: RunningService, key: str) -> dict[str, Any]:
    """Return a run once its newest data is worked out."""

    def advanced() -> dict[str, Any]:
        runs = httpx.get(f"{service.url}/v1/runs", timeout=60).json()["items"]
        return next((dict(each) for each in runs if each["key"] == key and not each["advancing"]), {})

    return wait_until(advanced)


def columns(service: RunningService, key: str, path: str, **parameters: Any) -> dict[str, list[Any]]:
    url = f"{service.url}/v1/runs/{run_named(service, key)['id']}/{path}"
    return dict(httpx.get(url, params=parameters, timeout=60).raise_for_status().json()["columns"])


def k3(service: RunningService, key: str) -> dict[int, float]:
    found = columns(service, key, "measurements", comparison="trainer/rollout", measure=["k3_kl"])
    return dict(zip(found["step"], found["k3_kl"], strict=True))


@pytest.mark.slow
# importers/test_formats has all formats.
@pytest.mark.parametrize("folder", ["prime-rl", "miles"])
def test_service_measures_what_the_framework_measures(
    shared_service: RunningService, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = FOLDERS[folder]
    words = [str(DUMPS / folder), "--format", name, "--run-key", folder, "--allow-pickle"]
    assert run(shared_service, *words) == 0
    assert "2 steps (1 to 45) with 16 rollouts imported; run" in capsys.readouterr().out
    found = k3(shared_service, folder)
    assert found == {step: pytest.approx(measures(read(folder, step))["k3_kl"], rel=1e-9) for step in (1, 45)}
    for step, value in found.items():
        for own in ("mismatch_kl/all/mean", "gen_kl_error"):
            if own in figures(folder, step):
                assert value == pytest.approx(figures(folder, step)[own], abs=1e-6, rel=0)
    described = run_named(shared_service, folder)
    assert described["state"] == "finished"
    assert described["trainer"].lower() == name
    assert run(shared_service, *words) == 0
    assert "shards of them already stored" in capsys.readouterr().out
    assert k3(shared_service, folder) == found


def test_own_scalars_keep_their_names(shared_service: RunningService) -> None:
    assert run(shared_service, str(DUMPS / "prime-rl"), "--run-key", "scalars") == 0
    found = columns(shared_service, "scalars", "scalars")
    values = {
        (step, name): value for step, name, value in zip(found["step"], found["name"], found["value"], strict=True)
    }
    own = figures("prime-rl", 45)["mismatch_kl/all/mean"]
    assert values[45, "mismatch_kl/all/mean"] == pytest.approx(own, rel=1e-6)


def test_invalid_step_ends_the_import_and_sends_nothing_of_it(
    shared_service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DUMPS / "prime-rl", tmp_path / "dumps")
    file = tmp_path / "dumps" / "token_exports" / "step_45" / "rank_1.jsonl"
    file.write_text(file.read_text().replace("token_ids", "tokens", 1))
    assert run(shared_service, str(tmp_path / "dumps"), "--run-key", "invalid") == 1
    shown = capsys.readouterr()
    assert "error: rank_1.jsonl, line 1, field `token_ids`: is missing" in shown.err
    assert "1 step (1)" in shown.out
    # Rank 0 of the step is valid and was not sent either.
    assert set(columns(shared_service, "invalid", "measurements")["step"]) == {1}
    assert "the run invalid is marked as failed; the same command continues it" in shown.err
    assert run_named(shared_service, "invalid")["state"] == "failed"
    shutil.copy(DUMPS / "prime-rl" / "token_exports" / "step_45" / "rank_1.jsonl", file)
    assert run(shared_service, str(tmp_path / "dumps"), "--run-key", "invalid") == 0
    assert run_named(shared_service, "invalid")["state"] == "finished"
    # A run that had ended stays what it was.
    file.write_text("")
    assert run(shared_service, str(tmp_path / "dumps"), "--run-key", "invalid") == 1
    assert run_named(shared_service, "invalid")["state"] == "finished"


def test_unfinished_step_is_left_out(
    shared_service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DUMPS / "prime-rl", tmp_path / "dumps")
    (tmp_path / "dumps" / "token_exports" / "step_45" / "STABLE").unlink()
    assert run(shared_service, str(tmp_path / "dumps"), "--run-key", "unfinished") == 0
    assert "step 45 is not finished (no STABLE file)" in capsys.readouterr().err
    assert set(k3(shared_service, "unfinished")) == {1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--until-idle", "1"], "--until-idle needs --follow"),
        (["--follow"], "has files of no known format: pass --format, one of prime-rl, nemo-rl"),
        (["--format", "nemo-rl"], r"no dumps of nemo-rl in .*: expected train_data_stepN\.jsonl"),
        (["/", "--format", "nemo-rl"], "reads one PATH, got 2"),
    ],
)
def test_wrong_arguments_say_what_to_do(
    shared_service: RunningService, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shared_service, str(tmp_path), *words, "--run-key", "wrong") == 1
    with pytest.raises(ConfigurationError, match=message):
        raise ConfigurationError(capsys.readouterr().err)
    with Reader(shared_service.url) as reader:
        assert "wrong" not in [each.key for each in reader.runs()], "no run is left behind"


class Following:
    """`foreshock import --follow` in a process of its own."""

    def __init__(self, service: RunningService, folder: Path, key: str, spool: Path, *words: str) -> None:
        arguments = ["import", str(folder), "--follow", "--run-key", key, "--settle", "1", *words]
        self.output = folder.parent / f"{key}.log"
        # Tests started in the background inherit an ignored SIGINT; their children would too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with self.output.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "foreshock.commands.main", *arguments, "--url", service.url],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "FORESHOCK_SPOOL_DIRECTORY": str(spool)},
            )

    def wait_for(self, text: str, seconds: float = 60) -> None:
        def printed() -> bool:
            assert self.process.poll() is None, self.text()
            return text in self.text()

        wait_until(printed, seconds, self.text)

    def text(self) -> str:
        return self.output.read_text()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def following(*arguments: Any) -> Iterator[Following]:
    started = Following(*arguments)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


def write_step(folder: Path, step: int, *, seed_step: int = 45) -> Path:
    """Write a step of NeMo-RL as a trainer would."""
    path = folder / f"train_data_step{step}.jsonl"
    shutil.copyfile(DUMPS / "nemo-rl" / f"train_data_step{seed_step}.jsonl", path)
    return path


@pytest.mark.slow
def test_killed_follower_continues_and_imports_nothing_twice(shared_service: RunningService, tmp_path: Path) -> None:
    folder, spool = tmp_path / "dumps", tmp_path / "spool"
    folder.mkdir()
    write_step(folder, 1, seed_step=1)
    with following(shared_service, folder, "killed", spool, "--format", "nemo-rl") as first:
        first.wait_for("step 1: 8 rollouts, 32 tokens")
        whole = write_step(folder, 2).read_bytes()
        first.wait_for("step 2: 8 rollouts")
        # A half-written file is not imported before it is whole.
        half = folder / "train_data_step3.jsonl"
        half.write_bytes(whole[: len(whole) // 2])
        first.wait_for("step 3 was not imported: train_data_step3.jsonl")
        assert "step 3: " not in first.text()
        first.end(signal.SIGKILL)
    half.write_bytes(whole)
    with following(shared_service, folder, "killed", spool, "--format", "nemo-rl", "--until-idle", "3") as second:
        assert second.process.wait(120) == 0
        text = second.text()
    assert "3 steps (1 to 3) with 24 rollouts imported, 2 shards of them already stored" in text
    found = columns(
        shared_service, "killed", "measurements", measure=["rollouts", "tokens"], comparison="trainer/rollout"
    )
    assert found["step"] == [1, 2, 3]
    assert found["tokens"] == [30, 133, 133]
    assert run_named(shared_service, "killed")["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_follower_delivers_till_its_end(shared_service: RunningService, tmp_path: Path, number: signal.Signals) -> None:
    folder, key = tmp_path / "dumps", f"stopped-{number.name}"
    folder.mkdir()
    write_step(folder, 1)
    with following(shared_service, folder, key, tmp_path / "spool", "--format", "nemo-rl") as follower:
        follower.wait_for("step 1: 8 rollouts")
        assert follower.end(number) == 0
        assert "stopped; the same command continues here" in follower.text()
        assert "Traceback" not in follower.text()
    assert set(k3(shared_service, key)) == {1}
    assert run_named(shared_service, key)["state"] == "running"


@pytest.mark.slow
def test_follower_waits_for_markers_and_reports_what_it_left(shared_service: RunningService, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    shutil.copytree(DUMPS / "prime-rl", folder)
    (folder / "token_exports" / "step_45" / "STABLE").unlink()
    shutil.copytree(DUMPS / "prime-rl" / "token_exports" / "step_1", folder / "token_exports" / "step_2")
    with following(
        shared_service, folder, "marked", tmp_path / "spool", "--format", "prime-rl", "--until-idle", "3"
    ) as follower:
        assert follower.process.wait(120) == 1
        text = follower.text()
    assert "step 1: 8 rollouts" in text
    assert "note: step 45 was not imported: it is not finished" in text
    # The copy in the folder of step 2 has the lines of step 1.
    assert "note: step 2 was not imported: rank_0.jsonl, line 1, field `step`: is 1 in the folder of step 2" in text
    assert set(k3(shared_service, "marked")) == {1}


@pytest.mark.slow
def test_files_that_change_after_their_import_are_reported(shared_service: RunningService, tmp_path: Path) -> None:
    folder, spool = tmp_path / "dumps", tmp_path / "spool"
    folder.mkdir()
    write_step(folder, 1)
    words = (shared_service, folder, "changed", spool, "--format", "nemo-rl", "--until-idle", "3")
    with following(*words) as follower:
        follower.wait_for("step 1: 8 rollouts")
        write_step(folder, 1, seed_step=1)
        assert follower.process.wait(120) == 0
        assert "the files of step 1 changed after it was imported" in follower.text()
    assert set(k3(shared_service, "changed")) == {1}


@pytest.mark.slow
def test_other_content_of_a_stored_step_is_rejected_and_alone(shared_service: RunningService, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    write_step(folder, 1, seed_step=1)
    assert run(shared_service, str(folder), "--format", "nemo-rl", "--run-key", "rejected", "--unfinished") == 0
    before = k3(shared_service, "rejected")
    write_step(folder, 1)
    write_step(folder, 2)
    words = ("--format", "nemo-rl", "--until-idle", "3", "--unfinished")
    with following(shared_service, folder, "rejected", tmp_path / "spool", *words) as follower:
        assert follower.process.wait(120) == 1
        assert "note: step 1 was not imported: 1 item rejected" in follower.text()
        assert follower.text().count("was not imported") == 1
    after = k3(shared_service, "rejected")
    assert set(after) == {1, 2}
    assert after[1] == before[1]


def test_left_out_rollouts_are_missing_in_the_diagnosis(
    shared_service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    recording, dumps = tmp_path / "recording", tmp_path / "dumps"
    recording.mkdir()
    line = {"prompt_token_ids": [1], "response_token_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}
    short = line | {"rollout_log_probs": [-1.0]}
    (recording / "step_0001.jsonl").write_text("\n".join(map(json.dumps, (line, short, line))))
    shutil.copytree(DUMPS / "slime", dumps)
    content = torch.load(dumps / "rollout_data" / "45.pt", weights_only=True)
    content["samples"][1]["rollout_log_probs"].pop()
    torch.save(content, dumps / "rollout_data" / "45.pt")
    for folder, words in ((recording, []), (dumps, ["--allow-pickle"])):
        key = f"left out of {folder.name}"
        assert run(shared_service, str(folder), "--run-key", key, *words) == 0
        assert "rollouts, since the lists" in "".join(capsys.readouterr())
        named = run_named(shared_service, key)
        assert named["state"] == "finished"
        diagnosis = httpx.get(f"{shared_service.url}/v1/runs/{named['id']}/diagnosis", timeout=60).json()
        missing = [each["sentence"] for each in diagnosis["missing"]]
        assert "1 of the logged items and rollouts did not arrive" in " ".join(missing), missing
