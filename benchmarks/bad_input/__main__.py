"""Does any input crash the service, make it answer 5xx, or grow without bound? `make bench-bad-input`.

1. Schemathesis over the OpenAPI document, with keys of each scope and without a key.
2. Mutated tables: bytes, footers, lengths, types, counts, dictionaries and values of Parquet files, and statistics.
3. Forged cursors that can be decoded, to every list.
4. Hostile texts (NUL, lone surrogates, numbers beyond 64 bits) in paths and queries of every page and every GET.
5. Bodies that are small to send and much to do (`floods.py`), with and without a key, while `/livez` is asked.

3 and 4 also on PostgreSQL, which refuses texts that SQLite takes. The service is the real one, in its own process,
with caps of 4 MiB a body, 4 M tokens a shard and 2 GiB a decoder. Bars: no 5xx; no status or content type that the
document lacks; every error a documented problem; an answer to every whole request; the service's process lives;
resident memory (its peak, as the kernel notes it) under 1 GiB for the service and under 2.5 GiB for a decoder, whose
cap is 2 GiB above its idle size; no file outside the store and the database; during the floods the 99th percentile of
`/livez` under 100 ms, and the service's resident memory up to 100 MiB above what it was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bad_input.addresses import send_cursors, send_queries
from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.described import send_described
from benchmarks.bad_input.floods import send_floods, watched
from benchmarks.bad_input.mutated import send_mutated
from benchmarks.bad_input.scene import DECODER_CAP, Scene, scene
from tests.service.postgres import start_postgres

MUTATIONS = 10_000
EXAMPLES = 12
CURSORS, QUERIES, FLOODS = 3_000, 6_000, 10_000
LIVE_SECONDS, FLOOD_BYTES = 0.1, 100 << 20
SERVICE_BYTES, DECODER_BYTES = 1 << 30, DECODER_CAP + (1 << 29)


def main() -> int:
    """Run all parts, print what was found, and return 1 if a bar is not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=MUTATIONS)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="of each operation and key")
    parser.add_argument("--floods", type=int, default=FLOODS)
    parser.add_argument("--only-floods", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seed = arguments.seed

    def reads(service: Scene, document: dict[str, Any]) -> dict[str, Tally]:
        return {
            "cursors": send_cursors(service, document, CURSORS, seed),
            "queries": send_queries(service, document, QUERIES, seed),
        }

    with in_scene() as (service, _):
        flood_pairs, floods_missed = run_floods(service, arguments.floods, seed)
    if arguments.only_floods:
        print("\n", " ".join(flood_pairs), f" reached={str(not floods_missed).lower()}", sep="")
        return int(floods_missed)
    with in_scene() as (service, document):
        tallies = {
            "mutated": send_mutated(service, document, arguments.mutations, seed),
            **reads(service, document),
            # Last: it may end the lease and the run.
            "described": send_described(service, arguments.examples, seed),
        }
        missed, pairs = report("sqlite", service, tallies)
    cluster = start_postgres()
    try:
        with in_scene(cluster.new_database()) as (service, document):
            missed_there, pairs_there = report("postgresql", service, reads(service, document))
    finally:
        cluster.stop()
    is_reached = not missed and not missed_there and not floods_missed
    print("\n", " ".join([*flood_pairs, *pairs, *pairs_there]), f" reached={str(is_reached).lower()}", sep="")
    return 0 if is_reached else 1


def run_floods(service: Scene, count: int, seed: int) -> tuple[list[str], bool]:
    """Send the floods, print what was found, and return the figures as pairs, and whether a bar is missed."""
    before = service.process.memory_info().rss
    with watched(service.url) as seconds:
        tally = send_floods(service, count, seed)
    grown = service.peaks()["service"] - before
    live = sorted(seconds)
    p99, longest = live[int(len(live) * 0.99)], live[-1]
    missed, pairs = report("floods", service, {"floods": tally})
    pairs += [f"floods_livez_p99_ms={p99 * 1e3:.0f}", f"floods_livez_max_ms={longest * 1e3:.0f}",
              f"floods_grown_mib={grown >> 20}"]  # fmt: skip
    return pairs, bool(missed) or p99 > LIVE_SECONDS or grown > FLOOD_BYTES


@contextmanager
def in_scene(database_url: str | None = None) -> Iterator[tuple[Scene, dict[str, Any]]]:
    """Start the service in a folder of its own; give it with its OpenAPI document."""
    with (
        tempfile.TemporaryDirectory(prefix="foreshock-bad-input-") as folder,
        scene(Path(folder), database_url) as service,
    ):
        yield service, httpx.get(f"{service.url}/openapi.json", timeout=120).json()


def report(database: str, service: Scene, tallies: dict[str, Tally]) -> tuple[int, list[str]]:
    """Print a table; return the number of bars that are not reached, and the figures as pairs."""
    print(f"\n{database}")
    for name, tally in tallies.items():
        statuses = ", ".join(f"{status or 'none'} × {count}" for status, count in sorted(tally.statuses.items()))
        print(f"{name:18} {tally.requests:6} requests: {statuses}")
        for fault, count in tally.faults.most_common():
            print(f"  {count:5} × {fault}\n          {tally.examples[fault]}")
    alive = service.process.is_running() and httpx.get(f"{service.url}/livez", timeout=60).status_code == 200
    peaks, strays = service.peaks(), service.strays()
    print(f"files outside the store: {', '.join(strays[:20]) or 'none'}")
    answered_5xx = sum(count for each in tallies.values() for status, count in each.statuses.items() if status >= 500)
    undocumented = sum(sum(each.faults.values()) for each in tallies.values()) - answered_5xx
    missed = [
        answered_5xx > 0, undocumented > 0, not alive, peaks["service"] > SERVICE_BYTES,
        peaks["decoder"] > DECODER_BYTES, bool(strays),
    ]  # fmt: skip
    figures = {name: tally.requests for name, tally in tallies.items()} | {
        "5xx": answered_5xx, "undocumented": undocumented, "alive": int(alive),
        "service_mib": peaks["service"] >> 20, "decoder_mib": peaks["decoder"] >> 20, "stray_files": len(strays),
    }  # fmt: skip
    if any(missed):
        print((service.folder / "serve.log").read_text()[-4000:], file=sys.stderr)
    return sum(missed), [f"{database}_{name}={value}" for name, value in figures.items()]


if __name__ == "__main__":
    sys.exit(main())
