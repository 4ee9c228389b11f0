"""Decode and check a report to the notary. Independent of the database; runs in a decoder."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, Field, StringConstraints, ValidationError

from foreshock.errors import InvalidRolloutsError
from foreshock.notary.reports import read_report
from foreshock_service.platform import parameters

MOST_ENGINES = 1000
MOST_TENSORS = 100_000

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Size = Annotated[int, Field(ge=0, lt=2**48)]
Piece = tuple[parameters.Name, Digest, Size, Size, Size, Size, Size]
Holder = Annotated[str, StringConstraints(pattern=r"^(trainer|(variant|engine):[^\x00-\x1f\x7f]{1,200})$")]


class _Said(BaseModel):
    """Digests of tensors by name, log-probs of a canary prompt, or both."""

    tensors: Annotated[
        dict[parameters.Name, Annotated[list[Piece], Field(min_length=1, max_length=4096)]],
        parameters.at_most(MOST_TENSORS),
    ]
    canary: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=4096)] = []
    others_as_announced: bool = False


class _Report(BaseModel):
    holders: Annotated[dict[Holder, _Said], parameters.at_most(MOST_ENGINES)]
    engines_in_all: Annotated[int | None, Field(ge=1, le=MOST_ENGINES)] = None


class Report(NamedTuple):
    """What each holder says, as JSON values, and the number of engines in all."""

    holders: dict[str, dict[str, Any]]
    engines_in_all: int | None


def decode(path: Path) -> Report:
    """Return the report in a file. Raises InvalidRolloutsError or LimitExceededError."""
    with path.open("rb") as file:
        holders, engines_in_all = read_report(pa.PythonFile(file, "r"))
    try:
        checked = _Report.model_validate({"holders": holders, "engines_in_all": engines_in_all})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(each) for each in first["loc"])[:200]
        raise InvalidRolloutsError(f"the report's {place}: {first['msg']}") from None
    return Report({holder: said.model_dump() for holder, said in checked.holders.items()}, checked.engines_in_all)
