"""Certificates of `foreshock certify`: stored whole, listed in short, and returned as they were made."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Path, Query, Response, status
from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from foreshock import page_addresses
from foreshock.api.certificates import CertificateRecord
from foreshock.api.records import parse, to_json
from foreshock.certify.certificate import SCHEMA, Certificate
from foreshock.certify.registry import engine_of
from foreshock.certify.text import headline
from foreshock.clock import now_us
from foreshock.digests import canonical_json, digest_of_bytes
from foreshock.errors import ConfigurationError
from foreshock_service.platform import audit, pagination, parameters, problem, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import StoredCertificate, new_identifier

router = parameters.api_router(prefix="/v1/certificates", tags=["certificates"])
_LONGEST_SUMMARY = 10_000
"""Characters of a certificate in short: 100 conditions."""
Identifier = Annotated[str, Path(max_length=200, pattern=parameters.SEGMENT_PATTERN)]


class InvalidCertificate(problem.ProblemError, status=422, problem_type="invalid-certificate"):
    """A certificate of another schema than this release's, with a fingerprint that is none, or with names too long."""


class CertificateNotFound(problem.ProblemError, status=404, problem_type="certificate-not-found"):
    """No certificate has this id, or the key may not see its project."""


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": CertificateRecord, "description": "It is stored already"}},
)
def create_certificate(
    body: Certificate,
    context: Context,
    principal: security.Ingester,
    response: Response,
    project: Annotated[parameters.Name, Query()] = page_addresses.DEFAULT_PROJECT,
) -> CertificateRecord:
    """Store a certificate that `foreshock certify` wrote; the same one again changes nothing."""
    summary = _summary(body, project)
    digest = digest_of_bytes(canonical_json(to_json(body)).encode())
    if not principal.sees(project):
        raise security.ScopeMissing(f"this key is bound to another project than {project!r}")

    def store(session: Session) -> CertificateRecord | None:
        known = session.scalar(select(StoredCertificate).filter_by(project=project, digest=digest))
        if known is not None:
            return parse(CertificateRecord, known.summary)
        documents = {"summary": to_json(summary), "document": to_json(body)}
        row = StoredCertificate(id=summary.id, project=project, digest=digest, created_at_us=now_us(), **documents)
        session.add(row)
        audit.record(session, principal, "certificate.create", row.id, project=project)
        return None

    known = context.database.write(store)
    if known is not None:
        response.status_code = status.HTTP_200_OK
    return known or summary


@router.get("")
def list_certificates(
    context: Context,
    principal: security.Reader,
    project: Annotated[parameters.Name | None, Query()] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = pagination.DEFAULT_LIMIT,
) -> pagination.Page[CertificateRecord]:
    """List certificates, newest first."""
    with context.database.read() as session:
        return certificates(session, principal, project, cursor, limit)


def certificates(
    session: Session, principal: security.Principal, project: str | None, cursor: str | None, limit: int
) -> pagination.Page[CertificateRecord]:
    """Return a page of the certificates that the principal may see, in short, the newest first."""
    table = StoredCertificate
    query = select(table).options(defer(table.document))
    query = query.where(*(table.project == each for each in principal.projects(project)))

    def read(rows: Sequence[Sequence[StoredCertificate]]) -> list[CertificateRecord]:
        return [parse(CertificateRecord, row[0].summary) for row in rows]

    return pagination.page_of_query(session, query, (table.created_at_us, table.id), cursor, limit, read)


@router.get("/{certificate}")
def read_certificate(certificate: Identifier, context: Context, principal: security.Reader) -> Certificate:
    """Return a certificate as it was made: a file for `foreshock certify show` and `--against`."""
    with context.database.read() as session:
        return certificate_named(session, principal, certificate)


def certificate_named(session: Session, principal: security.Principal, certificate_id: str) -> Certificate:
    return parse(Certificate, _find(session, principal, certificate_id).document)


def _find(session: Session, principal: security.Principal, certificate_id: str) -> StoredCertificate:
    row = session.get(StoredCertificate, certificate_id)
    if row is None or not principal.sees(row.project):
        raise CertificateNotFound(f"there is no certificate {certificate_id[:200]!r}")
    return row


@router.delete("/{certificate}", status_code=status.HTTP_204_NO_CONTENT)
def delete_certificate(certificate: Identifier, context: Context, principal: security.Administrator) -> None:
    """Delete a certificate; the same one can be stored again."""

    def delete(session: Session) -> None:
        row = _find(session, principal, certificate)
        session.delete(row)
        before = {"model": row.summary["model"], "made_at": row.summary["made_at"]}
        audit.record(session, principal, "certificate.delete", row.id, project=row.project, before=before)

    context.database.write(delete)


def _summary(body: Certificate, project: str) -> CertificateRecord:
    if body.schema != SCHEMA:
        raise InvalidCertificate(
            f"this is a certificate of schema {body.schema}; this service takes schema {SCHEMA}: make it again"
        )
    try:
        engine = engine_of(body)
    except ConfigurationError as error:
        raise InvalidCertificate(f"the certificate's fingerprint: {error}") from None
    named = (engine.engine, engine.engine_version, engine.dtype) if engine is not None else body.engines
    found = CertificateRecord(
        id=new_identifier("cert"), project=project, model=body.model, model_digest=body.model_digest,
        engine=" ".join(each for each in named if each), trainer=body.trainer, made_at=body.made_at,
        headline=headline(body), verdicts={row.name: row.verdict for row in body.rows},
    )  # fmt: skip
    if len(canonical_json(to_json(found))) > _LONGEST_SUMMARY:
        raise InvalidCertificate("the names of model, engine, trainer and conditions are too long to be listed")
    return found
