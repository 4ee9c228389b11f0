"""The task pages and the tour work as they are printed, beside the examples; only addresses and secrets differ."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import foreshock
from benchmarks.forking import environment
from benchmarks.running_service import forked_service
from examples.demo.records import COLLAPSED
from tests.paths import DOCS, PYTHONPATH, REPOSITORY
from tests.ports import free_port
from tests.service.object_store import ACCESS_KEY, SECRET_KEY, ObjectStoreServer
from tests.service.postgres import start_postgres
from tests.service.sending import make_batch
from tests.service.watch.notifications.receiver import Receiver
from tests.waiting import wait_until, wait_until_answered

pytestmark = pytest.mark.slow

ADDRESS = "http://127.0.0.1:8765"
QUICK_SERVICE = {"FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1"}


def blocks(page: str, language: str = "bash") -> list[str]:
    """Return the blocks of a page in a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder in which commands find the examples, and write beside them."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    return tmp_path


def surroundings(folder: Path, **settings: str) -> dict[str, str]:
    """Return the environment of commands: the programs and packages of this process, and these settings."""
    return environment(**settings) | {
        "FORESHOCK_SPOOL_DIRECTORY": str(folder / "spool"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": PYTHONPATH,
    }


def output_of(commands: str, folder: Path, url: str = ADDRESS) -> str:
    """Run commands as a reader does, with the service at `url`; return what they print, in one line."""
    shell = ["bash", "-euo", "pipefail", "-c", commands.replace(ADDRESS, url)]
    done = subprocess.run(
        shell, cwd=folder, env=surroundings(folder, FORESHOCK_URL=url), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return " ".join(done.stdout.split())


def assert_shown(text: str, printed: str) -> None:
    """Check that each line of a page's output is printed."""
    for line in text.splitlines():
        assert " ".join(line.split()) in printed, printed


@contextmanager
def running(commands: str, folder: Path, settings: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run commands that do not end by themselves; their output is in the file `log` of the folder."""
    with (folder / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["bash", "-euc", commands], cwd=folder, env=settings, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield shell
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(120)


def test_selfcheck_of_is_my_set_up_right(clone: Path) -> None:
    _, selfcheck = blocks("is-my-set-up-right.md")
    assert_shown(blocks("is-my-set-up-right.md", "text")[1], output_of(selfcheck, clone))


@pytest.mark.full
def test_certify_of_is_my_set_up_right(clone: Path) -> None:
    certify, _ = blocks("is-my-set-up-right.md")
    printed = output_of(certify, clone)
    for line in blocks("is-my-set-up-right.md", "text")[0].splitlines()[1:]:
        condition, verdict, *_ = line.split()
        assert re.search(rf"\b{condition} {verdict}\b", printed), printed


def test_report_of_my_run_collapsed(clone: Path) -> None:
    to_report, _, to_send = blocks("my-run-collapsed.md")
    with forked_service(clone, **QUICK_SERVICE) as url:
        assert_shown(blocks("my-run-collapsed.md", "text")[0], output_of(to_report, clone, url))
        output_of(to_send, clone, url)
    assert "<svg" in (clone / "report.html").read_text()


@pytest.mark.full
def test_doctor_of_my_run_collapsed(clone: Path) -> None:
    _, doctor, _ = blocks("my-run-collapsed.md")
    assert_shown(blocks("my-run-collapsed.md", "text")[1], output_of(doctor, clone))


@pytest.mark.full
def test_tour(clone: Path) -> None:
    start, terminal = blocks("tour.md", "")
    assert start == "make demo\n"
    with forked_service(clone, **QUICK_SERVICE) as url:
        output_of(f"foreshock import {COLLAPSED} --run-key collapsed", clone, url)
        printed = output_of(terminal, clone, url)
    assert "step 110" in printed
    text = " ".join((DOCS / "tour.md").read_text().split())
    training = json.loads((COLLAPSED / "manifest.json").read_text())["training"]
    assert f"at the temperature {training['sampling_temperature']:g}." in text
    assert f"from step {training['lag_from']} on" in text
    steps = [json.loads(line) for line in (COLLAPSED / "metrics.jsonl").read_text().splitlines()]
    assert f"the reward still rises to {max(step['reward'] for step in steps):.2f}:" in text


def test_let_it_act(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_advise, to_switch = blocks("let-it-act.md")
    (code,) = blocks("let-it-act.md", "python")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    names: dict[str, Any] = {
        "batches": [make_batch(seed=seed) for seed in range(3)],
        "optimizer": optimizer,
        "train": lambda batch, correction: None,
    }
    with forked_service(clone, **QUICK_SERVICE) as url:
        assert_shown(blocks("let-it-act.md", "text")[0], output_of(to_advise, clone, url))
        monkeypatch.setenv("FORESHOCK_URL", url)
        monkeypatch.setenv("FORESHOCK_SPOOL_DIRECTORY", str(clone / "spool"))
        exec(code, names)
        assert names["client"].flush(120)
        output_of(to_switch, clone, url)
        advice = httpx.get(f"{url}/v1/runs/my-run/advice", timeout=60).raise_for_status().json()
        names["feed"].close()
        names["client"].close()
    assert [advice[lever]["mode"] for lever in ("rate", "correction", "rollback")] == ["apply"] * 3


@pytest.mark.full
def test_watch_a_run(clone: Path) -> None:
    to_start, to_connect, to_look, to_scrape = blocks("watch-a-run.md")
    receiver, port = Receiver(), free_port()
    url = f"http://127.0.0.1:{port}"
    assert "slack://…" in to_start
    settings = surroundings(clone, FORESHOCK_PORT=str(port), **QUICK_SERVICE)
    try:
        with running(to_start.replace("slack://…", f"json://{receiver.host}/"), clone, settings) as shell:
            wait_until_answered(f"{url}/readyz", lambda: shell.poll() is None, clone / "log")
            assert receiver.requests, "the test message"
            output_of(to_connect, clone, url)
            looked = output_of(to_look, clone, url)
            scraped = output_of(to_scrape, clone, url)
    finally:
        receiver.close()
    assert "step 29" in looked
    assert "Healthy" in looked
    assert "foreshock_build_info" in scraped


HOST, HOST_ADDRESS = "foreshock", "127.0.0.2"
RESOLVING = f"""
import socket
resolve = socket.getaddrinfo
socket.getaddrinfo = lambda name, *rest, **more: resolve("{HOST_ADDRESS}" if name == "{HOST}" else name, *rest, **more)
"""


@pytest.mark.full
def test_run_it_for_a_team(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name `foreshock` is an address of this machine that is not 127.0.0.1, here and in the worker."""
    to_serve, to_work = blocks("run-it-for-a-team.md")
    cluster, store, port = start_postgres(), ObjectStoreServer(clone), free_port()
    for printed, real in (
        ("postgresql+psycopg://foreshock:…@database/foreshock", cluster.new_database()),
        ("s3://bucket/prefix", "s3://tokens/team"),
        ("http://store:8333", store.url),
        ("ACCESS_KEY_ID=…", f"ACCESS_KEY_ID={ACCESS_KEY}"),
        ("SECRET_ACCESS_KEY=…", f"SECRET_ACCESS_KEY={SECRET_KEY}"),
    ):
        assert printed in to_serve
        to_serve = to_serve.replace(printed, real)
    resolve = socket.getaddrinfo

    def resolved(name: Any, *rest: Any, **more: Any) -> Any:
        return resolve(HOST_ADDRESS if name == HOST else name, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    url = f"http://{HOST}:{port}"
    try:
        with running(to_serve, clone, surroundings(clone, FORESHOCK_PORT=str(port), **QUICK_SERVICE)) as shell:
            wait_until_answered(f"{url}/readyz", lambda: shell.poll() is None, clone / "log")
            trainer, worker = re.findall(r"fsk_\S+", (clone / "log").read_text())
            assert httpx.get(f"{url}/v1/runs", timeout=60).status_code == 401
            assert httpx.get(f"{url}/v1/runs", headers={"Host": "elsewhere"}, timeout=60).status_code == 400
            client = foreshock.Client(url, run_key="team", api_key=trainer, spool_directory=clone / "spool")
            with client.start_run(model="M"):
                client.log_rollouts(1, make_batch())
                assert client.flush(120)
            headers = {"Authorization": f"Bearer {trainer}"}
            run = httpx.get(f"{url}/v1/runs/team", headers=headers, timeout=60).raise_for_status().json()
            assert run["state"] == "finished"
            _work(to_work, clone, url, worker, headers)
    finally:
        store.kill()
        cluster.stop()


def _work(commands: str, clone: Path, url: str, key: str, headers: dict[str, str]) -> None:
    """Run the worker of the page until the service knows it."""
    folder = clone / "worker"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(RESOLVING)
    for printed, real in ((f"http://{HOST}:8765", url), ("fsk_…", key), ("/mnt/runs", str(folder))):
        assert printed in commands
        commands = commands.replace(printed, real)
    settings = surroundings(clone) | {"PYTHONPATH": f"{folder}:{PYTHONPATH}"}
    with running(commands, folder, settings) as shell:

        def is_known() -> bool:
            assert shell.poll() is None, (folder / "log").read_text()
            answer = httpx.get(f"{url}/v1/hardware", headers=headers, timeout=60).raise_for_status()
            return bool(answer.json()["workers"])

        wait_until(is_known, 300)
