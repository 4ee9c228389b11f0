"""What every gathering function works with."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from service.platform.context import ServiceContext
from service.platform.security import Principal


@dataclass(frozen=True, slots=True)
class Viewing:
    """One look at the service: a session that sees one state, for somebody with these rights."""

    context: ServiceContext
    session: Session
    principal: Principal
