"""Decode, check and judge reports to the notary. Independent of the database; runs in a decoder."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, Field, StringConstraints, ValidationError

from foreshock.api.records import parse, to_json
from foreshock.errors import InvalidRolloutsError
from foreshock.notary.compare import Holding, Verdict, judge
from foreshock.notary.pieces import Piece, Tensors
from foreshock.notary.reports import read_report
from foreshock_service.platform import parameters
from foreshock_service.platform.compression import zstd

MOST_ENGINES = 1000
MOST_TENSORS = 100_000

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Size = Annotated[int, Field(ge=0, lt=2**48)]
PieceOfReport = tuple[parameters.Name, Digest, Size, Size, Size, Size, Size]
Holder = Annotated[str, StringConstraints(pattern=r"^(trainer|(variant|engine):[^\x00-\x1f\x7f]{1,200})$")]


class _Said(BaseModel):
    """Digests of tensors by name, log-probs of a canary prompt, or both."""

    tensors: Annotated[
        dict[parameters.Name, Annotated[list[PieceOfReport], Field(min_length=1, max_length=4096)]],
        parameters.at_most(MOST_TENSORS),
    ]
    canary: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=4096)] = []
    others_as_announced: bool = False


class _Report(BaseModel):
    holders: Annotated[dict[Holder, _Said], parameters.at_most(MOST_ENGINES)]
    engines_in_all: Annotated[int | None, Field(ge=1, le=MOST_ENGINES)] = None


class Report(NamedTuple):
    """The report of each holder, as compressed JSON, and the number of engines in all."""

    holders: dict[str, bytes]
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
    documents = {holder: packed(said.model_dump()) for holder, said in checked.holders.items()}
    return Report(documents, checked.engines_in_all)


def packed(value: Any) -> bytes:
    return zstd.compress(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def unpacked(data: bytes) -> Any:
    return json.loads(zstd.decompress(data))


class Judged(NamedTuple):
    """The verdict on an engine, packed. `needs_history`: earlier announcements may explain it."""

    verdict: bytes
    is_right: bool
    needs_history: bool


class Engine(NamedTuple):
    """The report of an engine, and its packed verdict at an earlier step."""

    report: bytes
    before: bytes | None = None


def judge_engines(
    step: int,
    announced: bytes,
    engines: Mapping[str, Engine],
    history: Mapping[int, bytes],
    variants: Mapping[str, bytes],
) -> dict[str, Judged]:
    """Return the verdict on each engine that can be compared with what the trainer announced of `step`.

    `history`: the packed announcements of earlier steps. A document that this release cannot read is left out of it.
    """
    expected = _holding(unpacked(announced))
    known = {step: expected}
    for earlier, data in history.items():
        with suppress(Exception):
            known[earlier] = _holding(unpacked(data))
    others = {name: _holding(unpacked(data)).tensors for name, data in variants.items()}
    found = {}
    for name, engine in engines.items():
        said = unpacked(engine.report)
        held = _holding(said)
        if said["others_as_announced"]:
            held = Holding({**expected.tensors, **held.tensors}, held.canary)
        before = None
        with suppress(Exception):
            before = None if engine.before is None else parse(Verdict, unpacked(engine.before))
        verdict = judge(step, known, held, before, others)
        if verdict is not None:
            needs_history = bool(held.canary) or not verdict.is_right
            found[name] = Judged(packed(to_json(verdict)), verdict.is_right, needs_history)
    return found


def _holding(report: Mapping[str, Any]) -> Holding:
    tensors: Tensors = {
        name: [Piece(dtype, int(digest, 16), *place) for dtype, digest, *place in pieces]
        for name, pieces in report["tensors"].items()
    }
    return Holding(tensors, report["canary"])
