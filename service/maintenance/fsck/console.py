"""`foreshock fsck` on the database and the token store that the settings name."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock.commands.text import Progress
from foreshock_service.maintenance.context import maintenance_context
from foreshock_service.maintenance.fsck.service import Report, Request, check_store
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.database.tables.probes import ExactShard, ScoreShard
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import load_settings


def fsck(request: Request, *, as_json: bool, decoders: DecoderPool | None = None) -> int:
    """Check the store and print the report; return 0 if nothing is left to repair, else 1. Raises ConfigurationError.

    `decoders` lets a process that has a pool share it.
    """
    # Nothing is measured, so nothing needs to be compiled.
    settings = load_settings().model_copy(update={"token_pass": "numpy"})
    with maintenance_context(settings, decoders) as context:
        with context.database.read() as session:
            progress = Progress("checking files", _count(session))
        report = check_store(context, request, progress.show)
    if as_json:
        print(json.dumps(_document(report), indent=2, ensure_ascii=False))
    else:
        _show(report, request)
    return 0 if report.is_sound else 1


def _document(report: Report) -> dict[str, object]:
    return {
        "sound": report.is_sound,
        "checked": dict(report.checked),
        "purged": report.purged,
        "foreign": report.foreign,
        "findings": [asdict(finding) | {"to_do": finding.to_do} for finding in report.findings],
    }


def _show(report: Report, request: Request) -> None:
    checked = ", ".join(f"{count:,} of {kind}" for kind, count in sorted(report.checked.items())) or "none"
    how = "names and sizes" if request.quick else "names, sizes and contents"
    print(f"files checked by {how}: {checked}")
    if report.purged:
        print(f"purged by retention or with their runs: {report.purged:,}")
    if report.foreign:
        print(f"not written by the service, and left: {report.foreign:,}")
    counts = Counter((finding.problem, finding.repaired is not None) for finding in report.findings)
    if not counts:
        print("the catalogue and the files agree")
        return
    print(f"{'problem':<12}{'found':>8}{'repaired':>10}")
    for problem in dict.fromkeys(finding.problem for finding in report.findings):
        repaired = counts[problem, True]
        print(f"{problem:<12}{repaired + counts[problem, False]:>8,}{repaired:>10,}")
    for finding in report.findings:
        whose = f" ({finding.owner})" if finding.owner else ""
        print(f"\n{finding.problem}: {finding.file}{whose}\n  {finding.detail}")
        print(f"  repaired: {finding.repaired}" if finding.repaired else f"  to do: {finding.to_do}")


def _count(session: Session) -> int:
    return sum(
        session.scalar(select(func.count()).select_from(table)) or 0 for table in (Shard, ScoreShard, ExactShard)
    )
