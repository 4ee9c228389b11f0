"""Whether all places that tell a run's diagnosis say the same, word for word, and whether their lines fit.

Sixty runs with one fault of each kind of `field_kinds`, logged by the client to one service. What
the API says of a run is asked for in eight more places: its list, both pages, `report`, `runs` (both as JSON, too) and
`watch`.
`python -m benchmarks.diagnosis surfaces`.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import foreshock
from benchmarks.bars import Line
from benchmarks.diagnosis.field_kinds import KINDS
from benchmarks.running_service import service, wait_until
from foreshock.commands.main import main
from foreshock.diagnosis.headline import MOST_CHARACTERS
from foreshock.diagnosis.short_headline import MOST_CHARACTERS as MOST_OF_A_ROW
from foreshock_service.present.pages.presenters.run_list import RUNS_ON_A_PAGE

RUNS_OF_KIND, STEPS = 2, 6
RUNS = RUNS_OF_KIND * len(KINDS)
PLACES = 8
COLUMNS = 80


def measure() -> list[Line]:
    """Measure the places."""
    with service() as (folder, http):
        url = str(http.base_url)
        keys = [_log_run(url, folder, kind, number) for kind in range(len(KINDS)) for number in range(RUNS_OF_KIND)]
        listed = {run["key"]: run for run in _runs(http)}
        wait_until(lambda: all(_is_complete(http, listed[key]["id"]) for key in keys), 300)
        return _judge(http, url, keys)


def _log_run(url: str, folder: Path, kind: int, number: int) -> str:
    key, make = f"kind-{kind}-{number}", list(KINDS.values())[kind].make
    client = foreshock.Client(url, run_key=key, block_when_full=True, spool_directory=folder / "spool")
    client.start_run(model_kind="dense")
    for step in range(1, STEPS + 1):
        batch = make(np.random.default_rng([kind, number, step])).batch()
        client.log_rollouts(step, batch, attributes=batch.attributes)
    client.finish()
    client.close(120.0)
    return key


def _runs(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/v1/runs", params={"limit": 200}).json()["items"]
    return found


def _is_complete(http: httpx.Client, run: str) -> bool:
    return bool(http.get(f"/v1/runs/{run}/diagnosis").json()["observed_step"] == STEPS)


def _judge(http: httpx.Client, url: str, keys: list[str]) -> list[Line]:
    listed = {run["key"]: run for run in _runs(http)}
    pages = range(1, -(-len(keys) // RUNS_ON_A_PAGE) + 1)
    page = html.unescape("".join(http.get("/", params={"page": number}).text for number in pages))
    of_runs = {run["key"]: run for run in json.loads(_printed("runs", "--json", "--limit", "200", "--url", url))}
    rows = _printed("runs", "--limit", "200", "--url", url)
    same: Counter[str] = Counter()
    wide = [line for line in rows.splitlines() if len(line) > COLUMNS]
    print(*wide, sep="\n")
    long = Counter(width=len(wide))
    for key in keys:
        run, said = listed[key]["id"], http.get(f"/v1/runs/{listed[key]['id']}/diagnosis").json()
        headline, short = said["headline"], said["short"]
        long["headlines"] += len(headline) > MOST_CHARACTERS
        long["rows"] += len(short) > MOST_OF_A_ROW
        of_list = listed[key]["diagnosis"]
        same["list"] += (of_list["headline"], of_list["short"]) == (headline, short)
        same["page"] += headline in html.unescape(http.get(f"/runs/{run}").text)
        same["list page"] += short in page and headline in page
        same["report"] += headline in _printed("report", run, "--fail-on", "never", "--url", url)
        as_json = json.loads(_printed("report", run, "--json", "--fail-on", "never", "--url", url))
        same["report --json"] += as_json["diagnosis"]["headline"] == headline
        same["runs"] += short in rows
        same["runs --json"] += of_runs[key]["diagnosis"]["headline"] == headline
        same["watch"] += headline in _printed("watch", run, "--once", "--url", url)
    for name, number in same.items():
        print(f"{name:14} the same in {number} of {len(keys)} runs")
    return [
        Line("surfaces_same", f"of {RUNS} runs × {PLACES}, the same", same.total(), RUNS * PLACES, at_least=True),
        Line("surfaces_long_headlines", f"headlines above {MOST_CHARACTERS} characters", long["headlines"], 0),
        Line("surfaces_long_rows", f"rows above {MOST_OF_A_ROW} characters", long["rows"], 0),
        Line("surfaces_wide_lines", f"lines of `runs` above {COLUMNS} columns", long["width"], 0),
    ]  # fmt: skip


def _printed(*words: str) -> str:
    """Return what a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(words)
    return out.getvalue()
