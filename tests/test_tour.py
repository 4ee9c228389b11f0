"""The tour: its commands run as they are printed, on the run of its pictures, and its numbers are those of the run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.running_service import forked_service
from examples.tiny_rl.record import RECORDED
from tests.paths import DOCS, PYTHONPATH, REPOSITORY

pytestmark = pytest.mark.slow
PROGRAMS = Path(sys.executable).parent


def test_commands_of_the_tour_run_and_its_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    tour = (DOCS / "tour.md").read_text()
    start, terminal = re.findall(r"```\n(.*?)```", tour, re.DOTALL)
    assert start == "make demo\n"
    assert re.search(r"^demo:$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    described = json.loads((RECORDED / "manifest.json").read_text())["run"]
    settings = {"FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1"}
    with forked_service(tmp_path, **settings) as url:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
        environment |= {
            "FORESHOCK_URL": url,
            "FORESHOCK_SPOOL_DIRECTORY": str(tmp_path / "spool"),
            "PATH": f"{PROGRAMS}:{environment['PATH']}",
            "PYTHONPATH": PYTHONPATH,
        }

        def run(commands: str) -> str:
            shell = ["bash", "-euc", commands]
            done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            return done.stdout

        run(f"foreshock import {RECORDED} --run-key {described['key']} --model-kind dense")
        shown = " ".join(run(terminal).split())
        address = f"{url}/v1/runs/{described['key']}"
    assert "step 160" in shown
    assert described["key"] in shown
    page = (tmp_path / "report.html").read_text()
    assert f'href="{url}/runs/' in page
    (k3,) = re.findall(r"its mismatch is ([\d.e-]+),", tour)
    assert f"{k3}" in shown, (address, shown)
    assert "Healthy: k3 of trainer/rollout is" in shown or "Warning since step" in shown
