"""The pages of certificates: the matrix of conditions, one certificate, and two compared."""

from collections.abc import Sequence
from typing import Any

from foreshock.certify.compare import compare, comparison_lines
from foreshock.certify.text import HEADER, about, cells, headline
from foreshock.errors import ConfigurationError
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.replay.certificates import certificate_named, certificates

COLUMNS = 12
"""Certificates on a page of the matrix."""
_MOST_OTHERS = 100


def certificates_page(viewing: Viewing, cursor: str | None) -> dict[str, Any]:
    """Return the newest certificates in short, and the names of their conditions. Raises InvalidCursor."""
    found = certificates(viewing.session, viewing.principal, None, cursor, COLUMNS)
    conditions = dict.fromkeys(name for each in found.items for name in each.verdicts)
    return {"certificates": found.items, "conditions": list(conditions), "next_cursor": found.next_cursor}


def certificate_page(viewing: Viewing, certificate_id: str, other_id: str | None) -> dict[str, Any]:
    """Return a certificate, and its comparison with another one. Raises CertificateNotFound."""
    session, principal = viewing.session, viewing.principal
    found = certificate_named(session, principal, certificate_id)
    other = certificate_named(session, principal, other_id) if other_id else None
    newest = certificates(session, principal, None, None, _MOST_OTHERS).items
    compared: Sequence[str] = ()
    try:
        compared = comparison_lines(found, other, compare(found, other)) if other is not None else ()
    except ConfigurationError as error:
        compared = [f"These two cannot be compared: {error}."]
    return {
        "id": certificate_id,
        "headline": headline(found),
        "title": found.model,
        "about": about(found),
        "header": HEADER,
        "rows": [(row, cells(row)[1:]) for row in found.rows],
        "compared": compared,
        "others": [each for each in newest if each.model_digest == found.model_digest and each.id != certificate_id],
    }
