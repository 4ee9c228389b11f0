"""Is anything lost, doubled or changed by kills and faults? `make bench-faults`.

1. The service is killed with SIGKILL at random moments and at each point of `kill_points.py`, on SQLite and on
   PostgreSQL, while ranks upload to it; it is started again each time (`kills.py`). Each run is then compared with the
   run that a service without kills makes of the same bytes (`verify.py`).
   Part `advance`: it is killed before a statement of SQL by which it advances a run, any of the first 150.
   Part `processes`: the same with two service processes on PostgreSQL, of which one or both are killed.
2. Part `removals`: the service is killed while it deletes a run, deletes rollouts and purges tokens (`removals.py`).
3. PostgreSQL and an S3 server are killed and started again while the service runs on (`outages.py`).
4. A trainer whose client has a spool is killed and started again with that spool (`client_kills.py`).

Faults other than kills (a full disk, a frozen database, a store that refuses, a body that kills its decoder, a clock
that is set back) are tests.
After each part `foreshock check` checks the catalogue against the files. Bar: nothing lost, doubled, missing or
different.
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

from benchmarks.bars import Line, report
from benchmarks.faults.client_kills import run_client_kills
from benchmarks.faults.kill_points import ADVANCE
from benchmarks.faults.kills import Campaign
from benchmarks.faults.outages import NEEDS, kill_what_is_needed
from benchmarks.faults.removals import kill_removals
from benchmarks.faults.verify import Totals
from tests.service.postgres import PostgresCluster

# A new folder and new services after so many kills, so that no database grows without bound.
_CHUNK = 64
PARTS = ("kills", "advance", "processes", "removals", "needs", "client")
PROCESSES = 2


def kill_service(database: str, kills: int, seed: int, processes: int = 1, only: str = "") -> Totals:
    """Kill the service on a database `kills` times; at the point `only`, if that is given."""
    name, totals = database if processes == 1 else f"{database}-{processes}-processes", Totals()
    while totals.done < kills:
        goal = min(kills, totals.done + _CHUNK)
        with _database(database) as url:
            Campaign(name, url, totals, most=goal, seed=seed, processes=processes, only=only).run()
    return totals


def kill_while_removing(database: str, kills: int, seed: int) -> Totals:
    """Kill the service `kills` times while it removes data."""
    totals = Totals()
    with _database(database) as url:
        kill_removals(totals, database_url=url, most=kills, seed=seed)
    return totals


@contextmanager
def _database(name: str) -> Iterator[str]:
    """Return the URL of a new database; empty for SQLite."""
    if name == "sqlite":
        yield ""
        return
    cluster = PostgresCluster(Path(tempfile.mkdtemp(prefix="fsk-pg-", dir="/tmp")), durable=True)
    try:
        yield cluster.new_database()
    finally:
        cluster.stop()


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
    parser.add_argument("--kills", type=int, default=100, help="kills of the service on each database")
    parser.add_argument("--advance-kills", type=int, default=100, help="kills while a run advances, on each database")
    parser.add_argument("--process-kills", type=int, default=100, help="kills of one or both of two processes")
    parser.add_argument("--removal-kills", type=int, default=60, help="kills while data is removed, on each database")
    parser.add_argument("--need-kills", type=int, default=40, help="kills of PostgreSQL, and of an S3 server")
    parser.add_argument("--client-kills", type=int, default=100, help="kills of the trainer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=["sqlite", "postgresql", "both"], default="both")
    parser.add_argument("parts", nargs="*", default=[], help=f"default: {' '.join(PARTS)}")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    os.nice(5)
    begun, totals = time.monotonic(), dict[str, Totals]()
    databases = [name for name in ("sqlite", "postgresql") if arguments.database in (name, "both")]
    if "kills" in parts:
        for name in databases:
            totals[name] = kill_service(name, arguments.kills, arguments.seed)
    for name in databases if "advance" in parts else ():
        totals[f"{name}_advance"] = kill_service(name, arguments.advance_kills, arguments.seed, only=ADVANCE)
    if "processes" in parts and "postgresql" in databases:
        found = kill_service("postgresql", arguments.process_kills, arguments.seed, PROCESSES)
        totals["postgresql_2_processes"] = found
    if "removals" in parts:
        for name in databases:
            found = kill_while_removing(name, arguments.removal_kills, arguments.seed)
            totals[f"removals_{name}"] = found
    for name in NEEDS if "needs" in parts else ():
        totals[f"{name}_server"] = Totals()
        kill_what_is_needed(name, totals[f"{name}_server"], most=arguments.need_kills, seed=arguments.seed)
    if "client" in parts:
        totals["client"] = Totals()
        run_client_kills(totals["client"], most=arguments.client_kills, seed=arguments.seed)
    for name, each in totals.items():
        print_table(name, each)
    lines = [Line(f"{name}_kills", f"{name}, kills", found.done) for name, found in totals.items()]
    for what in ("acknowledged_shards", "lost", "doubled", "missing_files", "mismatches", "orphans"):
        count = sum(found.findings.counts[what] for found in totals.values())
        lines.append(Line(what, what.replace("_", " "), count))
    lines.append(Line("problems", "problems", sum(len(found.findings.problems) for found in totals.values()), 0))
    return report(lines, seconds=time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
