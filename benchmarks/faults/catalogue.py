"""`foreshock fsck` on the data of the service under test, as an operator runs it: catalogue = files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.faults.served import Served
from benchmarks.faults.verify import Findings

# Beside a service under test a file of a request that was killed is an orphan after so long; it is swept as often.
ORPHAN_GRACE_SECONDS = 4.0
_ORPHAN_PATIENCE_SECONDS = 60.0


def check_catalogue(findings: Findings, served: Served) -> None:
    """Run `foreshock fsck`: every row has its intact file; once the running service has swept, every file has a row."""
    deadline = time.monotonic() + _ORPHAN_PATIENCE_SECONDS
    while True:
        report = _fsck(served)
        orphans = [each for each in report["findings"] if each["problem"] == "orphan"]
        if not orphans or time.monotonic() > deadline:
            break
        findings.counts["orphans_seen_by_fsck"] += len(orphans)
        time.sleep(1.0)
    findings.counts["fsck_runs"] += 1
    findings.counts["fsck_files"] += sum(report["checked"].values())
    findings.counts["fsck_purged"] += report["purged"]
    findings.counts["fsck_foreign"] += report["foreign"]
    for each in report["findings"]:
        findings.problem("fsck", f"{each['problem']}: {each['file']} {each['detail']}")


def _fsck(served: Served) -> dict[str, Any]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    command = [sys.executable, "-m", "foreshock.commands.main", "fsck", "--json"]
    done = subprocess.run(command, env={**others, **served.settings}, capture_output=True, text=True, timeout=300)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"foreshock fsck failed: {done.stdout[-1000:]} {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report
