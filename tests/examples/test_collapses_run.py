"""Runs of a few steps of the benchmark of collapses: a real vLLM, real training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.collapses.results import read_result
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

RUNS = """
import json, sys
from dataclasses import replace
from pathlib import Path

from examples.collapses.__main__ import make_run, make_runs, use_one_thread
from examples.collapses.grid import DOSES, RunSettings

use_one_thread()
from examples.collapses.run import Laboratory
from examples.collapses.sampling import ReloadError

folder = Path(sys.argv[1])
doses = {dose.name: dose for dose in DOSES}
short = {name: replace(RunSettings(doses[name], 1e-3, 1), steps=4, prompts=2, responses=4) for name in doses}
laboratory = Laboratory()
lag = laboratory.run(short["lag2"]).values
first = laboratory.run(short["w4"]).values
found = {
    "lags": [values["rollout:lag_mean"] for values in lag],
    "same": laboratory.run(short["w4"]).values == first,
    "other": laboratory.run(short["bf16"]).values == first,
}


def interrupt(step):
    if step == 3:
        raise KeyboardInterrupt


try:
    make_run(laboratory, short["bf16"], {}, interrupt)
except KeyboardInterrupt:
    found["interrupted"] = True
engines = laboratory._engines
sampler, expected = engines._engines["auto"]
engines._engines["auto"] = sampler, expected + 1e-7
try:
    laboratory.run(short["bf16"])
except ReloadError as error:
    found["refused"] = str(error)
print("FOUND", json.dumps(found))
make_runs([short["none"]], folder)
"""


def test_runs_repeat_bit_for_bit_and_their_doses_are_as_declared(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(tmp_path)],
        capture_output=True, text=True, timeout=500, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["lags"] == [0, 1, 2, 2]
    # After a run with other weights and one of another dose.
    assert found["same"]
    assert not found["other"]
    assert found["interrupted"]
    assert "must be those of its start" in found["refused"]
    (path,) = tmp_path.iterdir()
    none = read_result(path)
    assert none.columns["trainer/rollout:max_abs_d"].tolist() == [0.0] * 4
    assert none.settings["steps"] == len(none.steps) == 4
    assert none.made_by["engine"]["engine"] == "vllm"
