"""Log recorded runs to a running service, and collect all that it says of them.

Only HTTP and the command line are used, so that the comparison outlives every change of the code behind them.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.csv

from benchmarks.forking import run_forked
from benchmarks.running_service import wait_until_advanced
from tests.golden.histories import History, Step
from tests.service.sending import Sender, start_run
from tests.service.working import LeaseHolder, announce_checkpoint, ask_for_lease, ask_for_probe, noisy, scores_of

VOLATILE = re.compile(
    r".*_at_us|id|run|run_id|probe|probes|alert|finding|lease|cursor|next_cursor|url|page|digest|.*_digest|age_seconds|"
    r"tags|note|baseline|advancing|"
    r"queued_seconds|.*_per_second|updated|created|finished|client|file|shard_digests|stored_bytes"
)
"""Keys whose values differ from one logging of a run to the next."""
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?( UTC|Z|\+00:00)?")
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+|\b(run|alert|probe|finding)_[0-9A-Za-z]{8,}\b")
_COMPARISONS = ("trainer/rollout", "rollout")
_SCORERS = ("vllm.decode", "vllm.prefill", "torch.trainer", "torch.float32")
_SETTLE_SECONDS = 90.0


def log_history(http: httpx.Client, history: History) -> Sender:
    """Log every step, then probe: scalars come before the rollouts of their step, as trainers log them."""
    sender = start_run(http, history.name, name=history.name, **history.about)
    last = 0
    for step in history.steps():
        _log_step(sender, step)
        # As in training, where a step takes longer than what follows from it.
        wait_until_advanced(http, sender.run)
        last = step.number
    for step_number in history.probed:
        announce_checkpoint(sender, step_number)
        ask_for_probe(sender, step_number, _SCORERS).raise_for_status()
    _score_jobs(http)
    http.patch(f"/v1/runs/{sender.run}", json={"state": "finished"}).raise_for_status()
    assert last
    return sender


def _log_step(sender: Sender, step: Step) -> None:
    if step.scalars:
        sender.put_scalars(step.number, dict(step.scalars)).raise_for_status()
    if step.rollouts is not None:
        sender.put_shard(step.number, step.rollouts).raise_for_status()


def _score_jobs(http: httpx.Client) -> None:
    """Do every queued job with the logged log-probs and a noise that depends on the scorer alone."""
    while (answer := ask_for_lease(http)).status_code == 200:
        holder = LeaseHolder(http, answer.json())
        rollouts = holder.rollouts()
        for each in holder.lease["job"]["scorers"]:
            scorer = each["scorer"]
            values = noisy(rollouts, seed=len(scorer), scale=0.002 * len(scorer))
            body = scores_of(rollouts, values, engine=scorer.partition(".")[0])
            holder.put_scores(body, scorer, variant=each["variant"]).raise_for_status()
        holder.complete().raise_for_status()


def collect(sender: Sender, history: History, is_expected: Callable[[str, Any], bool] | None) -> dict[str, Any]:
    """Return all answers about the run, without what differs from one logging to the next.

    They are collected after two rounds of the service's jobs, and again until each is expected or they have settled.
    Up to then a round ends at the first answer that is not expected.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    before: dict[str, Any] | None = None
    is_last = False
    while True:
        time.sleep(1.5)
        found: dict[str, Any] = {}
        all_expected = True
        for name, value in _answers(sender, history):
            found[name] = comparable(value)
            all_expected = all_expected and is_expected is not None and is_expected(name, found[name])
            if not (all_expected or is_last or is_expected is None):
                break
        if all_expected or is_last:
            break
        is_last = found == before or time.monotonic() > deadline
        before = found
    return found


def _answers(sender: Sender, history: History) -> Iterator[tuple[str, Any]]:
    for path in ("", "diagnosis", "lint", "lr-advice", "checkpoints", "attempts"):
        yield path or "run", _get(sender, path)
    kind = sender.http.get(f"/v1/runs/{sender.run}").json()["model_kind"]
    yield "rules", sender.http.get("/v1/rules", params={"model_kind": kind} if kind else {}).json()
    for path in ("alerts", "findings", "lr-advice/decisions"):
        yield path, _pages(sender, path)
    for comparison in _COMPARISONS:
        yield f"measurements {comparison}", _get(sender, "measurements", comparison=comparison)
    for step in history.looked_at:
        for path in ("lint", "attribution"):
            yield f"step {step} {path}", _get(sender, f"steps/{step}/{path}")
        for path in ("buckets", "corrections", "theory", "tokens"):
            query = {"worst": 20} if path == "tokens" else {}
            yield f"step {step} {path}", _get(sender, f"steps/{step}/{path}", comparison="trainer/rollout", **query)


def _get(sender: Sender, path: str, **query: Any) -> Any:
    answer = sender.get(path, **query) if path else sender.http.get(f"/v1/runs/{sender.run}")
    return answer.json() if answer.status_code != 404 else "404"


def _pages(sender: Sender, path: str) -> list[Any]:
    items: list[Any] = []
    cursor: str | None = None
    while True:
        answer = sender.get(path, limit=100, **({"cursor": cursor} if cursor else {})).raise_for_status().json()
        items += answer["items"]
        cursor = answer.get("next_cursor")
        if cursor is None:
            return sorted(items, key=lambda item: _text(comparable(item)))


def command_output(*words: str) -> str:
    """Return what a command prints, without moments and addresses."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    done = run_forked(words, environment | {"COLUMNS": "120", "NO_COLOR": "1"}, Path.cwd())
    assert done.returncode == 0, done.stderr
    return _plain(done.stdout)


def backtest(history: History, folder: Path) -> str:
    """Return the backtest of a history of scalars."""
    rows = [{"step": float(step.number), **step.scalars} for step in history.steps()]
    names = sorted({name for row in rows for name in row})
    file = folder / f"{history.name}.csv"
    pyarrow.csv.write_csv(pa.table({name: [row.get(name) for row in rows] for name in names}), file)
    return command_output("backtest", str(file), "--json").replace(str(folder), "")


def comparable(value: Any) -> Any:
    """Return an answer without the keys, moments and addresses that differ from one logging to the next."""
    if isinstance(value, dict):
        kept = {key: comparable(each) for key, each in value.items() if not VOLATILE.fullmatch(key)}
        if "headline" in kept:
            # Two changes of a diagnosis that come at once are one revision.
            kept.pop("revision", None)
        # Alerts of one step, and scores of one probe, have no order but that of their ids.
        unordered = {
            key: sorted(kept[key], key=_text) for key in ("alerts", "scores") if isinstance(kept.get(key), list)
        }
        return kept | unordered
    if isinstance(value, list):
        return [comparable(each) for each in value]
    return _plain(value) if isinstance(value, str) else value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(text: str) -> str:
    return _ADDRESS.sub("<address>", _MOMENT.sub("<moment>", text))
