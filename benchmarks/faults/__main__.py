"""Is anything lost, doubled or changed by kills and faults? `make bench-faults`.

1. The service is killed with SIGKILL at random moments and at each named point of `foreshock.kill_points`, on SQLite
   and on PostgreSQL, while ranks upload to it; it is started again each time (`kills.py`). Each run is then compared
   with the run that a service without kills makes of the same bytes (`verify.py`).
2. A trainer whose client has a spool is killed and started again with that spool (`client_kills.py`).
3. Other faults: full disk, read-only folder, PostgreSQL away and frozen, killed decoders, a shard that always kills its
   decoder, a clock that is set back (`cases.py`).

Bar: nothing lost, doubled, missing or different, and no problem in any case. `--state FOLDER` keeps the totals there: a
later call goes on where this one was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.faults.cases import CASES, CaseResult, line_of, run_cases
from benchmarks.faults.client_kills import run_client_kills
from benchmarks.faults.kills import Campaign, Totals
from tests.service.postgres import PostgresCluster

# A new folder and new services after so many kills, so that no database grows without bound.
_CHUNK = 64
PARTS = ("kills", "client", "cases")


@contextmanager
def postgresql() -> Iterator[PostgresCluster]:
    """Run a PostgreSQL cluster that syncs its commits."""
    cluster = PostgresCluster(Path(tempfile.mkdtemp(prefix="fsk-pg-", dir="/tmp")), durable=True)
    try:
        yield cluster
    finally:
        cluster.stop()


def kill_service(database: str, kills: int, seed: int, state: Path) -> Totals:
    """Kill the service on a database until there are so many kills in all."""
    path = state / f"{database}.json"
    totals = Totals.load(path)
    while totals.done < kills:
        goal = min(kills, totals.done + _CHUNK)
        if database == "sqlite":
            Campaign(database, "", totals, most=goal, seed=seed).run(path)
        else:
            with postgresql() as cluster:
                Campaign(database, cluster.new_database(), totals, most=goal, seed=seed).run(path)
    return totals


def kill_client(kills: int, seed: int, state: Path) -> Totals:
    """Kill the trainer until there are so many kills in all."""
    path = state / "client.json"
    totals = Totals.load(path)
    if totals.done < kills:
        run_client_kills(totals, most=kills, seed=seed, save=path)
    return totals


def print_table(name: str, totals: Totals) -> None:
    """Print the kills by point, the counts, and the problems."""
    print(f"\n{name}: {totals.done} kills, {totals.decoder_kills} more of a decoder alone")
    for point, count in sorted(totals.kills.items(), key=lambda each: -each[1]):
        print(f"  {point:28s} {count:5d}")
    for what, count in sorted(totals.findings.counts.items()):
        print(f"  {what.replace('_', ' '):28s} {count:9,d}")
    for text in totals.findings.problems:
        print(f"  {text}")


def main() -> int:
    """Run the chosen parts; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500, help="kills of the service on each database")
    parser.add_argument("--client-kills", type=int, default=100, help="kills of the trainer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=["sqlite", "postgresql", "both"], default="both")
    parser.add_argument("--state", type=Path, help="folder that keeps the totals between calls")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("parts", nargs="*", default=[], help=f"default: {' '.join(PARTS)}")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    state = arguments.state or Path(tempfile.mkdtemp(prefix="foreshock-faults-state-"))
    state.mkdir(parents=True, exist_ok=True)
    os.nice(5)
    begun, totals, cases = time.monotonic(), dict[str, Totals](), list[CaseResult]()
    if "kills" in parts:
        for name in ("sqlite", "postgresql"):
            if arguments.database in (name, "both"):
                totals[name] = kill_service(name, arguments.kills, arguments.seed, state)
    if "client" in parts:
        totals["client"] = kill_client(arguments.client_kills, arguments.seed, state)
    if "cases" in parts:
        with postgresql() as cluster:
            cases = run_cases(arguments.cases, lambda: cluster)
    for name, found in totals.items():
        print_table(name, found)
    if cases:
        print("\ncase, with the answers to uploads while the fault held")
    for case in cases:
        print(line_of(case))
    problems = sum(len(found.findings.problems) for found in totals.values())
    problems += sum(len(case.findings.problems) for case in cases)
    pairs = [f"{name}_kills={found.done}" for name, found in totals.items()]
    counted = ("acknowledged_shards", "lost", "doubled", "missing_files", "mismatches", "orphans")
    pairs += [f"{what}={sum(found.findings.counts[what] for found in totals.values())}" for what in counted]
    print(*pairs, f"cases={len(cases)}", f"problems={problems}", f"seconds={time.monotonic() - begun:.0f}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
