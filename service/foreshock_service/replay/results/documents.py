"""The errors of all kinds of results, and results that are one JSON document: stored by try, published with the job.

Documents of all kinds are rows of one table. A document that is sent again replaces the first one. `DOCUMENTS` has a
row for each kind.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Query, status
from sqlalchemy import ColumnElement, Select, select, update
from sqlalchemy.orm import Session

from foreshock import comparisons, layer_divergence, probe_kinds, routing, scorers
from foreshock.api import doctor, records, replays, runs
from foreshock.diagnosis.wording import as_sentence
from foreshock.doctor.findings import explained, fix_of
from foreshock.json_values import number_or_nan
from foreshock.measures.estimators.intervals import Interval
from foreshock_service.platform import parameters, problem
from foreshock_service.platform.database.engine import of_step, upsert
from foreshock_service.platform.database.tables import Probe, ProbeJob, ProbeResult
from foreshock_service.replay.leases import AskedLease, LeaseOfRequest
from foreshock_service.replay.probes.schemas import PairKey
from foreshock_service.runs import attempts, events, findings, weights
from foreshock_service.runs.due import mark

router = parameters.api_router(prefix="/v1")
Body = TypeVar("Body")
# Most documents of a step that are read, newest first, and most pairs of a step that are shown.
_MOST_READ, _MOST_PAIRS = 100, 16
MOST_LAYERS = 1_000
MOST_FINDINGS = 32
MOST_VARIANTS = 4_000
_LONGEST_TEXT = 2_000
_MOST_STEPS = 200
"""The newest reports of a run, which are read for its causes."""


class ResultNotAsked(problem.ProblemError, status=422, problem_type="result-not-asked"):
    """The job does not request this result, or it is of another step, other scorers or other weights than the job."""


class ResultNotFound(problem.ProblemError, status=404, problem_type="result-not-found"):
    """No result of this kind is done for the step: request one with a probe of that kind."""


class ResultIncomplete(problem.ProblemError, status=409, problem_type="result-incomplete"):
    """The job is not complete: a result was not sent, or lacks some rollouts."""


@dataclass(frozen=True, slots=True)
class DocumentKind(Generic[Body]):
    """A kind of probe whose result is a document of the type `body`; `noun` is its name in messages.

    `check` returns why a document does not belong to its job, None if it does. `pair` returns the comparison that a
    document measures.
    """

    probe: probe_kinds.ProbeKind
    noun: str
    body: type[Body]
    check: Callable[[Body, ProbeJob, Probe], str | None]
    pair: Callable[[Body], str] = lambda body: ""
    findings: runs.FindingSource | None = None

    def store(self, asked: AskedLease, body: Body) -> None:
        """Store the document of a leased job. Raises LeaseNotFound, LeaseLost, ResultNotAsked, InvalidRequest."""
        document = records.to_json(body)
        try:
            parameters.storable_json(document)
        except ValueError as error:
            raise problem.InvalidRequest(f"body: {error}") from error

        def store(session: Session) -> None:
            _, job, probe = asked.hold(session)
            if probe.kind != self.probe.name:
                raise ResultNotAsked(f"the job is of a probe of the kind {probe.kind!r}, expected {self.probe.name!r}")
            why = self.check(body, job, probe)
            if why is not None:
                raise ResultNotAsked(why)
            step = events.StepKey(probe.run_id, probe.attempt, probe.step)._asdict()
            row = {"job_id": job.id, "token": asked.token, "kind": probe.kind, "pair": self.pair(body), **step}
            upsert(session, ProbeResult, [{**row, "document": document, "published_at_us": None}], ("job_id", "token"))

        asked.context.database.write(store)

    def publish(self, session: Session, job: ProbeJob, probe: Probe, token: int, now_us: int) -> None:
        """Publish the document of a try. Raises ResultIncomplete if it was not sent."""
        same = (ProbeResult.job_id == job.id, ProbeResult.token == token)
        query = update(ProbeResult).where(*same).values(published_at_us=now_us).returning(ProbeResult.job_id)
        if session.scalar(query) is None:
            raise ResultIncomplete(
                f"the {self.noun} is missing: send it with PUT /v1/leases/{{lease}}/{self.probe.name}, then complete"
            )
        if self.findings is not None:
            mark(session, probe.run_id, source=self.findings)

    def published(self, *conditions: ColumnElement[bool]) -> Select[ProbeResult, Probe]:
        """Return the query for published documents with their probes, the newest first."""
        query = select(ProbeResult, Probe).join(ProbeJob, ProbeJob.id == ProbeResult.job_id).join(Probe)
        of_kind = (ProbeResult.kind == self.probe.name, ProbeResult.published_at_us.is_not(None), *conditions)
        return query.where(*of_kind).order_by(ProbeResult.published_at_us.desc(), ProbeResult.job_id)

    def of_step(
        self, session: Session, key: events.StepKey, pair: str | None = None
    ) -> tuple[dict[str, Any], list[tuple[ProbeResult, Probe]]]:
        """Return the fields of the step, and the newest document of each pair or of one. Raises ResultNotFound."""
        of_pair = () if pair is None else (ProbeResult.pair == pair,)
        found: dict[str, tuple[ProbeResult, Probe]] = {}
        for row, probe in session.execute(self.published(of_step(ProbeResult, key), *of_pair).limit(_MOST_READ)):
            found.setdefault(row.pair, (row, probe))
        if not found:
            raise ResultNotFound(
                f"no {self.noun} of step {key.step} of attempt {key.attempt} is done: request one with "
                f"foreshock probe {key.run_id} {key.step} --{self.probe.name}"
            )
        fields = {"run": key.run_id, "attempt": key.attempt, "step": key.step}
        return fields, list(found.values())[:_MOST_PAIRS]


def _foreign_weights(fingerprints: Iterable[Mapping[str, Any]], probe: Probe) -> str | None:
    """Return why fingerprints do not match the probe's weights; None if no fingerprint names other weights."""
    expected = probe.checkpoint["digest"]
    used = (fingerprint.get("weights_digest") for fingerprint in fingerprints)
    other = next((digest for digest in used if digest not in (None, expected)), None)
    return None if other is None else f"a fingerprint has the weights {other}, expected {expected}, those of the probe"


def _check_exact(body: replays.ExactComparison, job: ProbeJob, probe: Probe) -> str | None:
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
    return _foreign_weights((body.target_fingerprint, body.behaviour_fingerprint), probe)


def _check_layers(body: layer_divergence.LayerComparison, job: ProbeJob, probe: Probe) -> str | None:
    asked = [each["scorer"] for each in job.scorers]
    if (body.step, [body.compared, body.reference], body.pair) != (probe.step, asked, "/".join(asked)):
        return (
            f"got step {body.step} of {body.compared} and {body.reference}, expected step {probe.step} of "
            f"{' and '.join(asked)}"
        )
    if not 3 <= len(body.layers) <= MOST_LAYERS + 2:
        return f"a comparison has 3 to {MOST_LAYERS + 2} places, got {len(body.layers)}"
    expected = layer_divergence.names_of_places(len(body.layers) - 2)
    if tuple(layer.name for layer in body.layers) != expected:
        return f"layers must be {expected[0]}, {expected[1]}, … {expected[-1]} in this order"
    return _foreign_weights((body.compared_fingerprint, body.reference_fingerprint), probe)


def _check_routing(body: routing.RoutingComparison, job: ProbeJob, probe: Probe) -> str | None:
    asked = [scorers.score_name(each["scorer"], each["variant"]) for each in job.scorers]
    if [body.target, body.behaviour] != asked:
        return f"got routes of {body.target} and {body.behaviour}, expected those of {' and '.join(asked)}"
    measures = body.measures
    layers = [each.layer for each in measures.layers]
    if not 1 <= len(layers) <= routing.MOST_LAYERS or layers != sorted(set(layers)):
        return f"a comparison has 1 to {routing.MOST_LAYERS} layers in rising order, each once"
    shares = [measures.any_difference, measures.k3_share]
    shares += [share for each in measures.layers for share in (each.agreement, each.overlap, each.first_differences)]
    parts = (measures.all_tokens, measures.agreeing, measures.differing)
    nats = [interval for part in parts for interval in (part.k3_kl, part.abs_d)]
    if max(_bounds(shares)) > 1 or min(_bounds([*shares, *nats])) < 0:
        return "shares must be from 0 to 1, means in nats at least 0"
    if min(measures.top_k, *layers, measures.groups, measures.excluded, *(part.tokens for part in parts)) < 0:
        return "counts must be at least 0"
    return _foreign_weights((body.target_fingerprint, body.behaviour_fingerprint), probe)


def _bounds(intervals: Iterable[Interval]) -> list[float]:
    values = (value for each in intervals for value in (each.mean, each.low, each.high, 0.0))
    return [value for value in values if value is not None]


def _check_report(body: doctor.DoctorReport, job: ProbeJob, probe: Probe) -> str | None:
    if body.tokens != probe.tokens:  # rollouts without a token are left out
        return f"got a report on {body.tokens} tokens, expected one on the {probe.tokens} of the job"
    if len(body.findings) > MOST_FINDINGS or len(body.ruled_out) + len(body.not_tried) > MOST_VARIANTS:
        return f"a report has at most {MOST_FINDINGS} findings and {MOST_VARIANTS} other variants"
    texts = [body.ended, *(text for each in body.not_tried for text in (each.variant, each.why))]
    texts += [each.variant for each in body.ruled_out]
    texts += [text for each in body.findings for text in (each.sentence, each.value, each.cause, each.side)]
    if any(len(text) > _LONGEST_TEXT for text in texts):
        return f"texts of a report have at most {_LONGEST_TEXT} characters"
    return None


EXACT = DocumentKind(
    probe_kinds.EXACT, "comparison over the whole vocabulary", replays.ExactComparison, _check_exact, lambda it: it.pair
)
LAYERS = DocumentKind(
    probe_kinds.LAYERS, "comparison by layer", layer_divergence.LayerComparison, _check_layers, lambda it: it.pair
)
ROUTING = DocumentKind(
    probe_kinds.ROUTING,
    "comparison of routed experts",
    routing.RoutingComparison,
    _check_routing,
    pair=lambda body: comparisons.comparison_name(body.target, body.behaviour),
)
DOCTOR = DocumentKind(
    probe_kinds.DOCTOR, "examination by the doctor", doctor.DoctorReport, _check_report, findings="doctor"
)
DOCUMENTS: dict[str, DocumentKind[Any]] = {kind.probe.name: kind for kind in (EXACT, LAYERS, ROUTING, DOCTOR)}
"""The kinds of results that are documents, by kind of probe; scores are files."""


def _add_put(kind: DocumentKind[Any]) -> None:
    def put(asked: LeaseOfRequest, body: Any) -> None:
        kind.store(asked, body)

    put.__annotations__["body"] = kind.body
    router.put(
        f"/leases/{{lease}}/{kind.probe.name}",
        name=f"put_{kind.probe.name}",
        description=f"Store the {kind.noun}; it counts when the job is complete.",
        status_code=status.HTTP_204_NO_CONTENT,
        tags=["leases"],
    )(put)


for each in DOCUMENTS.values():
    _add_put(each)


@router.get("/runs/{run}/steps/{step}/exact", tags=["exact divergences"])
def read_exact(asked: attempts.StepOfRequest) -> replays.ExactStepRecord:
    """Return the exact divergences of the step's pairs; 404 `result-not-found` if none are published."""
    with asked.context.database.read() as session:
        key = asked.key(session)
        fields, _ = EXACT.of_step(session, key)
        return replays.ExactStepRecord(**fields, items=tuple(exact_of_step(session, key)))


def exact_of_step(session: Session, key: events.StepKey) -> list[replays.ExactRecord]:
    """Return the newest divergences of each pair at a step, by pair.

    Of those with the newest fingerprints they are the ones of most rollouts: a later sample hides no whole step.
    """
    chosen: dict[str, replays.ExactRecord] = {}
    for row, probe in session.execute(EXACT.published(of_step(ProbeResult, key)).limit(_MOST_READ)):
        pair = scorers.EXACT_PAIRS.get(row.pair) or scorers.ExactPair(*row.pair.split("/", 1))
        names = {"name": pair.name, "target": pair.target, "behaviour": pair.behaviour}
        shown = {"from_sample": probe.from_sample, "published_at_us": row.published_at_us}
        found = records.parse(replays.ExactRecord, {**row.document, **names, **shown})
        best = chosen.setdefault(found.pair, found)
        same = found.target_fingerprint == best.target_fingerprint
        same &= found.behaviour_fingerprint == best.behaviour_fingerprint
        if same and found.rollouts > best.rollouts:
            chosen[found.pair] = found
    return [chosen[pair] for pair in sorted(chosen)]


class LayersStepRecord(records.Record):
    """The newest comparison of each pair of a step, the newest first."""

    run: str
    attempt: int
    step: int
    items: tuple[layer_divergence.LayerComparison, ...]


@router.get("/runs/{run}/steps/{step}/layers", tags=["layers"])
def read_layers(
    asked: attempts.StepOfRequest,
    pair: Annotated[PairKey | None, Query(description="`compared/reference`; absent: the newest pairs")] = None,
) -> LayersStepRecord:
    """Return the newest comparison by layer of each pair at a step: where in the network two scorers depart.

    404 `result-not-found`: none is done; request a probe of the kind `layers`.
    """
    with asked.context.database.read() as session:
        fields, found = LAYERS.of_step(session, asked.key(session), pair)
    items = tuple(records.parse(layer_divergence.LayerComparison, row.document) for row, _ in found)
    return LayersStepRecord(**fields, items=items)


class RoutingRecord(routing.RoutingComparison):
    """A published comparison, and how it was made."""

    rollouts: Annotated[int, "rollouts of the probe"]
    tokens: Annotated[int, "response tokens of the probe"]
    from_sample: Annotated[bool, "a part of the step's rollouts"]
    published_at_us: int


class RoutingStepRecord(records.Record):
    """The newest comparison of each pair of scores at a step, the newest first."""

    run: str
    attempt: int
    step: int
    items: tuple[RoutingRecord, ...]


@router.get("/runs/{run}/steps/{step}/routing", tags=["routing"])
def read_routing(asked: attempts.StepOfRequest) -> RoutingStepRecord:
    """Return the newest comparison of routed experts of each pair of scorers at a step.

    404 `result-not-found`: none is done; request a probe of the kind `routing`.
    """
    with asked.context.database.read() as session:
        fields, found = ROUTING.of_step(session, asked.key(session))
    items = []
    for row, probe in found:
        made = {name: getattr(probe, name) for name in ("rollouts", "tokens", "from_sample")}
        published = {**row.document, **made, "published_at_us": row.published_at_us}
        items.append(records.parse(RoutingRecord, published))
    return RoutingStepRecord(**fields, items=tuple(items))


@router.get("/runs/{run}/steps/{step}/doctor", tags=["doctor"])
def read_report(asked: attempts.StepOfRequest) -> doctor.DoctorStepRecord:
    """Return the newest report of the doctor on a step: found, tried and not named, not tried, and the price.

    404 `result-not-found`: the step was not examined; request a probe of the kind `doctor`.
    """
    with asked.context.database.read() as session:
        _, found = DOCTOR.of_step(session, asked.key(session))
        return _report_record(session, *found[0])


def _report_record(session: Session, row: ProbeResult, probe: Probe) -> doctor.DoctorStepRecord:
    return doctor.DoctorStepRecord(
        run=row.run_id,
        attempt=row.attempt,
        step=row.step,
        probe=probe.id,
        from_sample=probe.from_sample,
        published_at_us=row.published_at_us or 0,
        report=records.parse(doctor.DoctorReport, row.document),
        checksums=weights.checksums_of_step(session, events.StepKey(row.run_id, row.attempt, row.step)),
    )


def causes_of_run(session: Session, run_id: str) -> list[findings.Finding]:
    """Return the causes named by the newest reports of active steps, each with its newest sentence."""
    query = (
        DOCTOR.published(ProbeResult.run_id == run_id)
        .order_by(None)
        .order_by(ProbeResult.step.desc(), ProbeResult.published_at_us.desc(), ProbeResult.job_id)
    )
    causes: dict[int, list[findings.Finding]] = {}
    for row in session.scalars(query.limit(_MOST_STEPS)):
        key = events.StepKey(run_id, row.attempt, row.step)
        if row.step not in causes and attempts.is_active(session, key):
            checksums = weights.checksums_of_step(session, key)
            report = records.parse(doctor.DoctorReport, row.document)
            causes[row.step] = [_finding(cause, checksums) for cause in report.causes]
    return findings.newest_of_steps(causes.items())


def _finding(cause: doctor.Finding, checksums: Sequence[str]) -> findings.Finding:
    sentence = ": ".join(filter(None, (cause.sentence, explained(cause))))
    if cause.side == "rollout" and checksums:
        sentence += f"; checksums: {' '.join(checksums)}"
    return findings.Finding(
        name=f"{cause.cause}/{cause.side}",
        severity="info",
        title=cause.sentence.rstrip("."),
        sentence=as_sentence(sentence),
        remedy=fix_of(cause) or None,
        confidence=runs.ConfidenceRecord(share=cause.share, low=cause.share_low, high=cause.share_high),
    )


def newest_report(session: Session, *of: ColumnElement[bool]) -> doctor.DoctorStepRecord | None:
    """Return the newest published report for which these conditions on its row hold."""
    found = session.execute(DOCTOR.published(*of).limit(1)).first()
    return None if found is None else _report_record(session, *found)
