"""Is anything lost, doubled or changed by kills and faults? `make bench-faults`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.faults.kills import Campaign, Totals
from tests.service.postgres import PostgresCluster


@contextmanager
def postgresql() -> Iterator[PostgresCluster]:
    """Run a PostgreSQL cluster that syncs its commits."""
    cluster = PostgresCluster(Path(tempfile.mkdtemp(prefix="fsk-pg-", dir="/tmp")), durable=True)
    try:
        yield cluster
    finally:
        cluster.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=["sqlite", "postgresql", "both"], default="both")
    a = parser.parse_args()
    os.nice(10)
    for name in ("sqlite", "postgresql"):
        if a.database not in (name, "both"):
            continue
        totals = Totals()
        if name == "sqlite":
            Campaign(name, "", totals, most=a.kills, seed=a.seed).run()
        else:
            with postgresql() as cluster:
                Campaign(name, cluster.new_database(), totals, most=a.kills, seed=a.seed).run()
        print(totals.kills, totals.findings.counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
