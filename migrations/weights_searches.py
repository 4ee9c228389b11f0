"""Convert stored weights searches of an earlier release to reports of the doctor, which now searches weights."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from foreshock_service.platform.database.tables.base import JsonColumn

_ENDED = "weights searches are made by the doctor now: request an examination"
_RESULTS = sa.table(
    "probe_results",
    *(sa.column(name) for name in ("job_id", "token", "run_id", "kind", "published_at_us")),
    sa.column("document", JsonColumn),
)
_DUE = sa.table("due_findings", *(sa.column(name) for name in ("run_id", "source", "changes")))
_SEARCHES = "SELECT id FROM probes WHERE kind = 'weights'"


def convert(connection: sa.Connection) -> None:
    """Convert stored results of searches to reports, and end searches that wait or run."""
    rows = connection.execute(sa.select(_RESULTS).where(_RESULTS.c.kind == "weights")).all()
    for row in rows:
        same = (_RESULTS.c.job_id == row.job_id, _RESULTS.c.token == row.token)
        report = report_of_search(row.document)
        connection.execute(sa.update(_RESULTS).where(*same).values(kind="doctor", document=report))
    for run_id in sorted({row.run_id for row in rows if row.published_at_us is not None}):
        for source in ("attribution", "doctor"):
            connection.execute(sa.delete(_DUE).where(_DUE.c.run_id == run_id, _DUE.c.source == source))
            connection.execute(sa.insert(_DUE).values(run_id=run_id, source=source, changes=1))
    ended = f"UPDATE probe_jobs SET state = 'skipped', reason = :reason WHERE probe_id IN ({_SEARCHES})"
    connection.execute(sa.text(f"{ended} AND state IN ('queued', 'running')"), {"reason": _ENDED})
    connection.execute(sa.text("UPDATE probes SET kind = 'doctor' WHERE kind = 'weights'"))


def report_of_search(search: dict[str, Any]) -> dict[str, Any]:
    """Return the doctor's report of what a stored search found, by the thresholds of searches."""
    floor = search.get("floor_k3") or 0.0
    done = sorted((each for each in search["replays"] if each["k3_kl"] is not None), key=lambda each: each["k3_kl"])
    announced = next((each for each in done if each["step"] == search["step"]), None)
    others = [each for each in done if each is not announced]
    before = announced["k3_kl"] if announced else None
    best = others[0] if others else None
    kind, cause, value = "unknown", "unknown", ""
    says = "the engine's logged log-probs (μ) are reproduced by no weights that the search replayed"
    if before is not None and before <= max(1e-12, floor):
        kind, cause = "expected", "rounding"
        says = "the engine's logged log-probs (μ) are those of the announced weights"
    elif best and _is_shown(best["k3_kl"], before, search.get("confirmed_k3"), floor):
        is_whole = best["part"] == "all"
        kind, cause, value = "cause", "other_weights" if is_whole else "part_of_weights", _words(best)
        which = "the weights" if is_whole else "the announced weights with the"
        says = f"the engine's logged log-probs (μ) are those of {which} {value}"
    after = best["k3_kl"] if best and kind == "cause" else before
    share = None if before is None or after is None else 1 - after / max(before, 1e-300)
    finding = {
        "kind": kind, "side": "rollout", "cause": cause, "value": value, "sentence": says,
        "tokens": search["tokens"], "rollouts": search["rollouts"], "share": share if kind == "cause" else None,
        "before": before, "after": after, "exact": kind != "unknown",
    }  # fmt: skip
    side = {"side": "rollout", "precision": search["scorer"], "before": before, "after": after, "noise": floor}
    named = [each for each in others if kind != "cause" or each is not best]
    return {
        "rollouts": search["rollouts"],
        "tokens": search["tokens"],
        "findings": [finding],
        "sides": [side | {"rounding": None}],
        "ruled_out": [
            {"variant": _words(each), "share": 1 - each["k3_kl"] / before if before else None} for each in named
        ],
        "not_tried": [
            {"variant": _words(each), "why": each["skipped"]} for each in search["replays"] if each["skipped"]
        ],
        "replays": len(done),
        "seconds": 0.0,
        "ended": search.get("ended") or "the search is complete",
    }


def _is_shown(best: float, announced: float | None, confirmed: float | None, floor: float) -> bool:
    """Return whether other weights are at the noise floor, ten times nearer than the announced ones, and confirmed."""
    least = max(1e-12, floor)
    is_clear = announced is None or announced >= 10 * max(best, least)
    return is_clear and best <= max(1e-6, 4 * floor) and confirmed is not None and abs(confirmed - best) <= least


def _words(replay: dict[str, Any]) -> str:
    step = f"step {replay['step']}"
    return step if replay["part"] == "all" else f"{replay['part']} of {step}"
