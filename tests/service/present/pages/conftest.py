"""A run behind the pages: rollouts and scalars as a trainer would send them, measured by the service itself."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext

from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_service.app import create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from scripts.chromium import MISSING, chromium_program, running_chromium
from tests.service.present.pages import fleet as runs
from tests.service.present.pages.browsing import PATIENCE_MS, Visit
from tests.service.sending import Sender, start_run
from tests.service.server import RunningServer
from tests.service.working import announce_checkpoint, ask_for_probe, wait_for_attribution, work_off

STEPS = 12
GROUPS = 8
RESPONSES = 4
# What a hostile client might call its run: markup, a template, a script, and an attribute that ends early.
HOSTILE = "\"'><script>window.hacked=1</script><img src=x onerror=window.hacked=2>{{7*7}}"


def rollouts(step: int, noise: float) -> RolloutBatch:
    """The rollouts of a step: responses grow, the trainer's log-probs differ from the engine's by `noise`."""
    random = np.random.default_rng(step)
    lengths = random.integers(6, 10, GROUPS * RESPONSES) + 2 * step
    tokens = int(lengths.sum())
    behaviour = -random.exponential(1.0, tokens).astype(np.float32)
    return RolloutBatch(
        sample_ids=[f"{step}-{number}" for number in range(lengths.size)],
        prompt_token_ids=np.tile(np.arange(4, dtype=np.int32), lengths.size),
        prompt_offsets=np.arange(lengths.size + 1, dtype=np.int64) * 4,
        response_token_ids=random.integers(1, 100, tokens).astype(np.int32),
        response_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rollout_log_probs=behaviour,
        trainer_log_probs=np.minimum(behaviour + random.normal(0.0, noise, tokens), 0.0).astype(np.float32),
        group_ids=[f"{step}-{number // RESPONSES}" for number in range(lengths.size)],
        reward=random.random(lengths.size).astype(np.float32),
        attributes=BatchAttributes(temperature=1.0),
    )


@dataclass(frozen=True, slots=True)
class SentRun:
    """A stored run of the project "default"."""

    id: str
    key: str
    name: str

    @property
    def address(self) -> str:
        return f"/runs/default/{quote(self.key, safe='')}"

    @property
    def forms(self) -> str:
        return f"/runs/{self.id}"


def send_run(http: httpx.Client, key: str, name: str | None = None, steps: int = STEPS, noise: float = 0.01) -> SentRun:
    """Send a whole run as a trainer's client would."""
    sender = start_run(http, key, name=name, model="tiny", trainer="a trainer", initial_learning_rate=1e-4)
    for step in range(1, steps + 1):
        sender.put_scalars(step, {"grad_norm": 1.0 / step}).raise_for_status()
        sender.put_shard(step, rollouts(step, noise)).raise_for_status()
    return SentRun(sender.run, key, name or key)


def replay(http: httpx.Client, run: SentRun, step: int) -> None:
    """Announce a step's weights, ask for a probe of it, and answer as a worker would."""
    sender = Sender(http, run.id)
    announce_checkpoint(sender, step)
    ask_for_probe(sender, step, ("vllm.prefill", "torch.trainer", "torch.float32")).raise_for_status()
    assert work_off(http) == 2, "one job for each engine"
    wait_for_attribution(sender, step)


@dataclass(frozen=True, slots=True)
class Site:
    """A service that many tests look at and none changes."""

    http: httpx.Client
    url: str
    run: SentRun
    replayed: SentRun
    hostile: SentRun


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path, decoders: DecoderPool) -> Iterator[Site]:
    """A service with a run of a dozen steps, one that a worker has replayed, and one with a hostile name."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(sqlite_template, folder / "foreshock.db")
    settings = Settings(database_url=f"sqlite:///{folder / 'foreshock.db'}", store_url=str(folder / "tokens"))
    with RunningServer(create_app(settings, decoders)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        run = send_run(http, "healthy", "a healthy run")
        replayed = send_run(http, "replayed", "a replayed run", steps=3)
        replay(http, replayed, step=3)
        yield Site(http, server.url, run, replayed, send_run(http, HOSTILE, HOSTILE, steps=1))


@dataclass(frozen=True, slots=True)
class Fleet:
    """A service with the five kinds of run, which no test changes."""

    http: httpx.Client
    url: str
    ids: dict[str, str]
    certificates: tuple[str, ...]

    def address(self, name: str) -> str:
        return f"/runs/default/{name}"

    def get(self, name: str, path: str, **query: Any) -> Any:
        return self.http.get(f"/v1/runs/{self.ids[name]}/{path}", params=query).raise_for_status().json()

    def measured(self, name: str, comparison: str, measure: str) -> dict[int, float]:
        columns = self.get(name, "measurements", comparison=comparison, measure=measure)["columns"]
        return dict(zip(columns["step"], columns[measure], strict=True))


@contextmanager
def running_app(folder: Path, decoders: DecoderPool | None = None) -> Iterator[tuple[httpx.Client, FastAPI]]:
    """A service on the migrated database of a folder, which closes steps that lack a shard at once."""
    settings = Settings(
        database_url=f"sqlite:///{folder / 'foreshock.db'}", store_url=str(folder / "tokens"),
        step_grace_seconds=0.5, sweep_interval_seconds=0.2,
    )  # fmt: skip
    app = create_app(settings, decoders)
    with RunningServer(app) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http, app


def send_fleet(http: httpx.Client) -> Fleet:
    """Send a run of each kind; that with the mismatch is replayed, and its trainer follows the advice."""
    senders = {name: runs.send_kind(http, name) for name in runs.KINDS}
    runs.acknowledge(senders["mismatch"])
    runs.replay_as_engine_difference(senders["mismatch"], runs.KINDS["mismatch"])
    runs.wait_until_closed(senders["incomplete"])
    ids = {name: sender.run for name, sender in senders.items()}
    return Fleet(http, str(http.base_url).rstrip("/"), ids, runs.send_certificates(http))


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path, decoders: DecoderPool) -> Iterator[Fleet]:
    """A service with the five kinds of run, which no test changes."""
    folder = tmp_path_factory.mktemp("fleet")
    shutil.copy(sqlite_template, folder / "foreshock.db")
    with running_app(folder, decoders) as (http, _):
        yield send_fleet(http)


@pytest.fixture
def own_run(http: httpx.Client) -> SentRun:
    """A short run in a service of the test's own, to change."""
    return send_run(http, "own", "my own run", steps=2)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The machine's own Chromium."""
    if chromium_program() is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with running_chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def window(browser: Browser) -> Iterator[BrowserContext]:
    """One window for all visits: the browser keeps what it has loaded and compiled."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    # Plotly is 5 MB of script; on a busy machine that takes its time.
    context.set_default_timeout(PATIENCE_MS)
    context.set_default_navigation_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def visit(window: BrowserContext) -> Iterator[Visit]:
    """A visit with a wide screen."""
    page = window.new_page()
    yield Visit(page)
    page.close()
