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

from benchmarks import bars
from benchmarks.bad_input.addresses import send_cursors, send_queries
from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.described import send_described
from benchmarks.bad_input.floods import send_floods, watched
from benchmarks.bad_input.mutated import send_mutated
from benchmarks.bad_input.scene import DECODER_CAP, Scene, scene
from benchmarks.bars import Line
from tests.service.postgres import start_postgres

MUTATIONS = 10_000
EXAMPLES = 12
CURSORS, QUERIES, FLOODS = 3_000, 6_000, 10_000
_MEBIBYTE = 1 << 20
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
        lines = run_floods(service, arguments.floods, seed)
    if arguments.only_floods:
        return bars.report(lines)
    with in_scene() as (service, document):
        tallies = {
            "mutated": send_mutated(service, document, arguments.mutations, seed),
            **reads(service, document),
            # Last: it may end the lease and the run.
            "described": send_described(service, arguments.examples, seed),
        }
        lines += judged("sqlite", service, tallies)
    cluster = start_postgres()
    try:
        with in_scene(cluster.new_database()) as (service, document):
            lines += judged("postgresql", service, reads(service, document))
    finally:
        cluster.stop()
    return bars.report(lines)


def run_floods(service: Scene, count: int, seed: int) -> list[Line]:
    """Send the floods, print what was found, and return the lines of the table."""
    before = service.process.memory_info().rss
    with watched(service.url) as seconds:
        tally = send_floods(service, count, seed)
    grown = service.peaks()["service"] - before
    live = sorted(seconds)
    return [
        *judged("floods", service, {"floods": tally}),
        Line("floods_livez_p99_ms", "floods: /livez at p99, ms", 1e3 * live[int(len(live) * 0.99)], 1e3 * LIVE_SECONDS),
        Line("floods_livez_max_ms", "floods: /livez, the longest, ms", 1e3 * live[-1]),
        Line("floods_grown_mib", "floods: growth of the service, MiB", grown / _MEBIBYTE, FLOOD_BYTES / _MEBIBYTE),
    ]


@contextmanager
def in_scene(database_url: str | None = None) -> Iterator[tuple[Scene, dict[str, Any]]]:
    """Start the service in a folder of its own; give it with its OpenAPI document."""
    with (
        tempfile.TemporaryDirectory(prefix="foreshock-bad-input-") as folder,
        scene(Path(folder), database_url) as service,
    ):
        yield service, httpx.get(f"{service.url}/openapi.json", timeout=120).json()


def judged(part: str, service: Scene, tallies: dict[str, Tally]) -> list[Line]:
    """Print the answers and the faults of a part; return the lines of the table."""
    print(f"\n{part}")
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
    service_mib, decoder_mib = (peaks[name] / _MEBIBYTE for name in ("service", "decoder"))
    lines = [
        *(Line(f"{part}_{name}", f"{part}: {name}, requests", tally.requests) for name, tally in tallies.items()),
        Line(f"{part}_5xx", f"{part}: answers with 5xx", answered_5xx, 0),
        Line(f"{part}_undocumented", f"{part}: answers that are not documented", undocumented, 0),
        Line(f"{part}_alive", f"{part}: the service lives", int(alive), 1, at_least=True),
        Line(f"{part}_service_mib", f"{part}: peak of the service, MiB", service_mib, SERVICE_BYTES / _MEBIBYTE),
        Line(f"{part}_decoder_mib", f"{part}: peak of a decoder, MiB", decoder_mib, DECODER_BYTES / _MEBIBYTE),
        Line(f"{part}_stray_files", f"{part}: files outside the store", len(strays), 0),
    ]
    if not all(line.is_reached for line in lines):
        print((service.folder / "serve.log").read_text()[-4000:], file=sys.stderr)
    return lines


if __name__ == "__main__":
    sys.exit(main())
