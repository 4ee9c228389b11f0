"""The vocabulary of a run: the text of each token id, which a worker reads beside the weights that it replays.

It is sent in parts, at the first job of a run that has none. Runs of a project with the same vocabulary share the rows.
"""

from collections.abc import Sequence
from typing import Annotated

from cachetools import LRUCache
from fastapi import status
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.vocabulary import LONGEST_TEXT, MOST_TOKENS, digest_of_texts
from foreshock_service.platform import parameters
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import Run, VocabularyPart
from foreshock_service.platform.problem import InvalidRequest
from foreshock_service.replay.leases import LeaseOfRequest

router = parameters.api_router(prefix="/v1/leases", tags=["leases"])


class VocabularyPut(BaseModel):
    """A part of a vocabulary: the texts of the ids from `first` on."""

    model_config = ConfigDict(extra="forbid")

    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] = Field(
        description="of all texts; it names the vocabulary"
    )
    size: int = Field(ge=1, le=MOST_TOKENS, description="ids in all parts; the part that ends there is the last")
    first: int = Field(ge=0, lt=MOST_TOKENS)
    texts: list[Annotated[str, StringConstraints(max_length=LONGEST_TEXT)]] = Field(min_length=1, max_length=8192)


@router.put("/{lease}/vocabulary", status_code=status.HTTP_204_NO_CONTENT)
def put_vocabulary(asked: LeaseOfRequest, body: VocabularyPut) -> None:
    """Store a part of the vocabulary of the run's model. After the last part the pages of the run show texts."""

    def store(session: Session) -> None:
        _, _, probe = asked.hold(session)
        run = session.get_one(Run, probe.run_id)
        row = {"project": run.project, "digest": body.digest, "first": body.first, "texts": body.texts}
        upsert(session, VocabularyPart, [row], ("project", "digest", "first"))
        if body.first + len(body.texts) >= body.size:
            if digest_of_texts(_texts(session, run.project, body.digest)) != body.digest:
                raise InvalidRequest("body.digest: it is not that of the texts of all parts: send them all again")
            run.vocabulary = body.digest

    asked.context.database.write(store)


_kept: LRUCache[tuple[str, str], Sequence[str]] = LRUCache(4)


def vocabulary_of_run(session: Session, run: Run) -> Sequence[str] | None:
    """Return the text of each token id; None if no worker has sent it."""
    if run.vocabulary is None:
        return None
    key = (run.project, run.vocabulary)
    if key not in _kept:
        _kept[key] = _texts(session, *key)
    return _kept[key]


def _texts(session: Session, project: str, digest: str) -> list[str]:
    query = select(VocabularyPart.texts).filter_by(project=project, digest=digest).order_by(VocabularyPart.first)
    return [text for part in session.scalars(query) for text in part]
