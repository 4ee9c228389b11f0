"""Exact divergences: comparisons of a pair of scorers over the whole vocabulary, measured by the worker."""

from fastapi import status
from sqlalchemy.orm import Session

from foreshock import probe_kinds, scorers
from foreshock.api import records, replays
from foreshock.json_values import number_or_nan
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Probe, ProbeJob, ProbeResult
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.results.documents import DocumentKind, foreign_weights
from foreshock_service.runs import attempts, events

router = parameters.api_router(prefix="/v1")


def _check(body: replays.ExactComparison, job: ProbeJob, probe: Probe) -> str | None:
    if [body.pair] != job.exact_pairs:
        return f"got divergences of {body.pair}, expected those of {', '.join(job.exact_pairs) or 'no pair'}"
    if min(body.tokens, body.non_finite, body.rollouts, body.groups) < 0:
        return "counts must be at least 0"
    if body.tokens + body.non_finite > probe.tokens or body.rollouts > probe.rollouts:
        return (
            f"got {body.tokens + body.non_finite} states of {body.rollouts} rollouts, expected at most the "
            f"{probe.tokens} of {probe.rollouts} of the job"
        )
    # In a body null is None.
    shares = [number_or_nan(each) for each in (body.tv.mean, body.top1_flip.mean, body.delta_max)]
    of_nats = (body.kl, body.reverse_kl, body.target_entropy, body.behaviour_entropy, body.k3_kl)
    nats = [number_or_nan(each.mean) for each in of_nats]
    if any(value < 0 for value in (*shares, *nats)) or any(value > 1 for value in shares):
        return "divergences and entropies must be at least 0, total variations and shares at most 1"
    return foreign_weights((body.target_fingerprint, body.behaviour_fingerprint), probe)


KIND = DocumentKind(
    probe=probe_kinds.EXACT,
    noun="comparison over the whole vocabulary",
    check=_check,
    asked=lambda job: bool(job.exact_pairs),
    pair=lambda body: body.pair,
)


@router.put("/leases/{lease}/exact", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_exact(
    lease: LeaseIdentifier,
    token: LeaseToken,
    body: replays.ExactComparison,
    context: Context,
    principal: security.Worker,
) -> None:
    """Store the exact divergences of a pair; they count when the job is complete."""
    KIND.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/exact", tags=["exact divergences"])
def read_exact(asked: attempts.StepOfRequest) -> replays.ExactStepRecord:
    """Return the exact divergences of the step's pairs; 404 `result-not-found` if none are published."""
    key, _ = KIND.of_step(asked, 1)
    with asked.context.database.read() as session:
        items = tuple(exact_of_step(session, key))
    return replays.ExactStepRecord(run=key.run_id, step=key.step, attempt=key.attempt, items=items)


def exact_of_step(session: Session, key: events.StepKey) -> list[replays.ExactRecord]:
    """Return the newest divergences of each pair at a step, by pair.

    Of those with the newest fingerprints they are the ones of most rollouts: a later sample hides no whole step.
    """
    chosen: dict[str, replays.ExactRecord] = {}
    for row, probe in KIND.newest(session, key):
        found = _record(row, probe)
        best = chosen.setdefault(found.pair, found)
        same = found.target_fingerprint == best.target_fingerprint
        same &= found.behaviour_fingerprint == best.behaviour_fingerprint
        if same and found.rollouts > best.rollouts:
            chosen[found.pair] = found
    return [chosen[pair] for pair in sorted(chosen)]


def _record(row: ProbeResult, probe: Probe) -> replays.ExactRecord:
    pair = scorers.EXACT_PAIRS.get(row.pair) or scorers.ExactPair(*row.pair.split("/", 1))
    names = {"name": pair.name, "target": pair.target, "behaviour": pair.behaviour}
    shown = {"from_sample": probe.from_sample, "published_at_us": row.published_at_us}
    return records.parse(replays.ExactRecord, {**row.document, **names, **shown})
