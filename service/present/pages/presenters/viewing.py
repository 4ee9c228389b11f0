"""The database as one page's presenters see it: one session, which sees one state, with the rights of one visitor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.orm import Session

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.security import Principal


@dataclass(frozen=True, slots=True)
class Viewing:
    """The context of every presenter. Its session only reads: a page never writes."""

    context: ServiceContext
    session: Session
    principal: Principal


@contextmanager
def open_viewing(context: ServiceContext, principal: Principal) -> Iterator[Viewing]:
    """Give the viewing of one request; its session is closed at the end."""
    with context.database.read() as session:
        yield Viewing(context, session, principal)
