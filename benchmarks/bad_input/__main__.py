"""Does any input crash the service, make it answer 5xx, or grow without bound? `make bench-bad-input`.

1. Schemathesis over the OpenAPI document, with keys of each scope and without a key.
2. MUTATIONS mutated bodies: Parquet files (bytes, footers, lengths, types, counts, dictionaries, values), shards of
   statistics, and JSON, to every call that takes a body.

The service is the real one, in its own process, with caps of 4 MiB a body, 4 M tokens a shard and 2 GiB a decoder.
Bars: no 5xx; no status or content type that the document lacks; every error a problem document; the service's process
lives; resident memory (its peak, as the kernel notes it) under 1 GiB for the service and under 2.5 GiB for a decoder,
whose cap is 2 GiB above its idle size; no file outside the store and the database.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import httpx

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.described import send_described
from benchmarks.bad_input.mutated import send_mutated
from benchmarks.bad_input.scene import DECODER_CAP, Scene, scene

MUTATIONS = 10_000
EXAMPLES = 12
SERVICE_BYTES, DECODER_BYTES = 1 << 30, DECODER_CAP + (1 << 29)


def main() -> int:
    """Run both parts, print what was found, and return 1 if a bar is not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=MUTATIONS)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="of each operation and key")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="foreshock-bad-input-") as folder, scene(Path(folder)) as service:
        document = httpx.get(f"{service.url}/openapi.json", timeout=120).json()
        mutated = send_mutated(service, document, arguments.mutations, arguments.seed)
        described = send_described(service, arguments.examples, arguments.seed)
        faults = report(service, mutated, described)
        print(Path(folder, "serve.log").read_text()[-4000:] if faults else "", file=sys.stderr)
    return 1 if faults else 0


def report(service: Scene, mutated: Tally, described: Tally) -> int:
    """Print a table and a line of figures; return the number of bars that are not reached."""
    for name, tally in (("mutated bodies", mutated), ("OpenAPI document", described)):
        statuses = ", ".join(f"{status} × {count}" for status, count in sorted(tally.statuses.items()))
        print(f"{name:18} {tally.requests:6} requests: {statuses}")
        for fault, count in tally.faults.most_common():
            print(f"  {count:5} × {fault}\n          {tally.examples[fault]}")
    alive = service.process.is_running() and httpx.get(f"{service.url}/livez", timeout=60).status_code == 200
    peaks, strays = service.peaks(), service.strays()
    print(f"files outside the store: {', '.join(strays[:20]) or 'none'}")
    answered_5xx = sum(
        count for tally in (mutated, described) for status, count in tally.statuses.items() if status >= 500
    )
    undocumented = sum(sum(tally.faults.values()) for tally in (mutated, described)) - answered_5xx
    missed = [
        answered_5xx > 0, undocumented > 0, not alive, peaks["service"] > SERVICE_BYTES,
        peaks["decoder"] > DECODER_BYTES, bool(strays),
    ]  # fmt: skip
    print(
        f"mutated={mutated.requests} described={described.requests} 5xx={answered_5xx} undocumented={undocumented} "
        f"alive={int(alive)} service_mib={peaks['service'] >> 20} decoder_mib={peaks['decoder'] >> 20} "
        f"stray_files={len(strays)}"
    )
    return sum(missed)


if __name__ == "__main__":
    sys.exit(main())
