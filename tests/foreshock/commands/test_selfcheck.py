"""Tests of `foreshock selfcheck`: findings in files, also in invalid ones, and the checks that were not possible."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreshock.commands.main import main
from foreshock.rollouts import BatchAttributes, RolloutBatch, encode_rollouts
from tests.foreshock.importers.make_dumps import DUMPS
from tests.foreshock.lint.conftest import recorded_step
from tests.foreshock.lint.healthy import healthy_batch
from tests.paths import RECORDED


def write_lines(path: Path, batch: RolloutBatch, **changed: np.ndarray) -> Path:
    """Return a batch as JSON lines, as trainers dump them; `changed` replaces a column."""
    columns = {
        "rollout_log_probs": batch.rollout_log_probs,
        "old_log_probs": batch.trainer_log_probs,
        "entropy": batch.entropy,
    } | changed
    with gzip.open(path, "wt") as file:
        for row in range(batch.num_rollouts):
            start, end = batch.response_offsets[row : row + 2]
            line = {
                "group": row // 16,
                "prompt_token_ids": batch.prompt_token_ids[
                    batch.prompt_offsets[row] : batch.prompt_offsets[row + 1]
                ].tolist(),
                "response_token_ids": batch.response_token_ids[start:end].tolist(),
                **{name: values[start:end].tolist() for name, values in columns.items() if values is not None},
            }
            file.write(json.dumps(line) + "\n")
    return path


def test_recorded_run_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", str(RECORDED)]) == 0
    assert "160 steps, 20,480 rollouts, 389,887 tokens, 47 of 48 checks: clean." in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["nemo-rl", "prime-rl", "slime"])
def test_dumps_of_a_framework_are_read_as_import_reads_them(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", str(DUMPS / folder), "--allow-pickle"]) in (0, 1)
    found = capsys.readouterr()
    assert "2 steps, 16 rollouts, " in found.out
    assert f"format: {folder}" in found.err


def test_checks_with_one_missing_column_share_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step_0001.parquet"
    batch = replace(healthy_batch(1), trainer_log_probs=None)
    path.write_bytes(encode_rollouts(batch))
    assert main(["selfcheck", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 step, 128 rollouts" in text
    assert "20 of 48 checks: clean." in text
    assert text.count("needs rollout_log_probs and trainer_log_probs") == 1
    assert "identical_log_probs, wrong_log_base" in text


def test_probabilities_in_json_lines_are_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = recorded_step(40)
    assert step.rollout_log_probs is not None
    path = write_lines(tmp_path / "step_0040.jsonl.gz", step, rollout_log_probs=np.exp(step.rollout_log_probs))
    assert main(["selfcheck", str(path)]) == 1
    out = capsys.readouterr().out
    assert "critical  probabilities_as_log_probs: probabilities were logged instead of log-probs" in out
    assert "rollout_log_probs" in out
    assert "What to do: Log the natural logarithm" in out
    assert max(len(line) for line in out.splitlines()) <= 100


def test_parquet_that_the_service_rejects_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = recorded_step(40)
    assert step.trainer_log_probs is not None
    path = tmp_path / "batch.parquet"
    path.write_bytes(encode_rollouts(replace(step, trainer_log_probs=-step.trainer_log_probs)))
    assert main(["selfcheck", str(path)]) == 1
    assert "negated_log_probs" in capsys.readouterr().out


def test_k3_is_measured_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = recorded_step(40)
    assert batch.trainer_log_probs is not None
    path = tmp_path / "step_0040.parquet"
    for factor, status, verdict in ((1.0, 0, "healthy"), (3.0, 1, "critical")):
        changed = replace(batch, trainer_log_probs=batch.trainer_log_probs * np.float32(factor))
        path.write_bytes(encode_rollouts(changed))
        assert main(["selfcheck", str(path)]) == status
        assert f"tokens: {verdict}; 1e-5 to 1e-3 is healthy for a dense model." in " ".join(
            capsys.readouterr().out.split()
        )
        assert main(["selfcheck", "--json", str(path), "--fail-on", "never"]) == 0
        assert json.loads(capsys.readouterr().out)["k3_kl"]["verdict"] == verdict


def test_options_complete_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "step_0040.jsonl.gz", recorded_step(40))
    assert main(["selfcheck", str(path), "--temperature", "0.7", "--logprobs-mode", "raw_logprobs"]) == 1
    assert "sampled with temperature 0.7" in capsys.readouterr().out


def test_each_warning_is_shown_once_with_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (3, 4, 7):
        batch = healthy_batch(number)
        copied = batch if number == 4 else replace(batch, trainer_log_probs=batch.rollout_log_probs)
        (tmp_path / f"step_{number:04d}.parquet").write_bytes(encode_rollouts(copied))
    assert main(["selfcheck", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.count("identical_log_probs:") == 1
    assert "(at 2 of 3 steps, 3 to 7; this is step 3)" in " ".join(out.split())
    assert "3 steps" in out
    assert "1 of them clean" in out


def test_shards_of_a_step_are_judged_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = healthy_batch(1)
    again = replace(batch, sample_ids=[f"again-{row}" for row in range(batch.num_rollouts)])
    for shard, part in enumerate((batch, again)):
        (tmp_path / f"step_0001_shard_{shard}.parquet").write_bytes(encode_rollouts(part))
    # A warning, which fails only if it is asked to.
    assert main(["selfcheck", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["selfcheck", "--json", "--fail-on", "warning", str(tmp_path)]) == 1
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert [warning["name"] for warning in step["warnings"]] == ["duplicated_rollouts"]
    assert step["files"] == ["step_0001_shard_0.parquet", "step_0001_shard_1.parquet"]


def test_weak_signals_add_up_over_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 25):
        batch = healthy_batch(number, groups=8, per_group=4, longest=6)
        assert batch.entropy is not None
        wrong = replace(batch, entropy=batch.entropy * np.float32(1.4), attributes=BatchAttributes())
        (tmp_path / f"step_{number:04d}.parquet").write_bytes(encode_rollouts(wrong))
    assert main(["selfcheck", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "in all 24 steps together" in " ".join(out.split())
    assert "24 steps" in out


def test_json_holds_everything_and_no_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step_0001.parquet"
    path.write_bytes(encode_rollouts(replace(healthy_batch(1), trainer_log_probs=None)))
    assert main(["selfcheck", "--json", str(path)]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (step,) = document["steps"]
    assert document["together"] is None
    assert document["unreadable"] == []
    assert {check["state"] for check in step["checks"]} == {"clean", "not checked"}


def test_unreadable_file_is_named_and_others_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_0001.parquet").write_bytes(b"not Parquet")
    (tmp_path / "step_0002.parquet").write_bytes(encode_rollouts(healthy_batch(2)))
    assert main(["selfcheck", str(tmp_path)]) == 2
    streams = capsys.readouterr()
    assert "step_0001.parquet: " in streams.err
    assert "1 step" in streams.out


@pytest.mark.parametrize("arguments", [["nowhere.parquet"], ["--temperature", "-1", str(RECORDED)]])
def test_invalid_arguments_are_not_findings(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", *arguments]) == 2
    assert "foreshock: error:" in capsys.readouterr().err
