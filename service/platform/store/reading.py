"""Errors of token files that the catalogue names and the store does not give back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from foreshock.errors import RolloutsError
from foreshock_service.platform.problem import ProblemError


class TokensGone(ProblemError):
    """Gone: a token file that the catalogue names is not in the store."""

    status = 410
    problem_type = "tokens-gone"


class TokensPurged(ProblemError):
    """Purged: retention or a deletion removed the tokens; measurements and rollout summaries stay."""

    status = 410
    problem_type = "tokens-purged"


class TokensDamaged(ProblemError):
    """Damaged: a token file does not hold what was written; its checksums or its layout are wrong."""

    status = 500
    problem_type = "tokens-damaged"


@contextmanager
def present_file(what: str) -> Iterator[None]:
    """Raise TokensGone if a file of the store is missing; for a block whose other errors may be of an upload."""
    try:
        yield
    except FileNotFoundError as error:
        raise TokensGone(
            f"the token file of {what} is not in the store: sending its bytes again restores it, or a backup"
        ) from error


@contextmanager
def stored_file(what: str) -> Iterator[None]:
    """Raise TokensGone or TokensDamaged for a file of the store that cannot be read; `what` says whose it is."""
    try:
        with present_file(what):
            yield
    except RolloutsError as error:
        raise TokensDamaged(
            f"the token file of {what} is damaged: sending its bytes again restores it, or a backup ({error.fault})"
        ) from error
