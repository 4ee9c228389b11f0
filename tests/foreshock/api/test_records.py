"""Answers as the service serves them and as a client of another release reads them."""

import json
import math
from collections.abc import Mapping
from dataclasses import field
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from pydantic import TypeAdapter

from foreshock.api.records import NAN, Measured, Record, from_attributes, parse, to_json


class Part(Record):
    name: str
    share: Annotated[Measured, "E[d²]"] = NAN


class Whole(Record):
    """An answer."""

    id: str
    rate: float | None = None
    state: Literal["open", "closed"] = "open"
    first: Part | None = None
    parts: tuple[Part, ...] = ()
    shares: Mapping[str, Measured] = field(default_factory=dict)
    mixed: str | float | None = None


SERVED: dict[str, Any] = {
    "id": "a",
    "rate": None,
    "state": "closed",
    "first": None,
    "parts": [{"name": "b", "share": None}, {"name": "c", "share": 0.5}],
    "shares": {"d": None},
    "mixed": "text",
}


def test_null_is_nan_in_a_number_that_may_be_not_estimable_and_none_elsewhere() -> None:
    whole = parse(Whole, SERVED)
    assert (whole.rate, whole.first, whole.mixed) == (None, None, "text")
    assert math.isnan(whole.parts[0].share)
    assert whole.parts[1] == Part(name="c", share=0.5)
    assert math.isnan(whole.shares["d"])


def test_answer_of_a_newer_or_older_service_is_read() -> None:
    newer = {**SERVED, "id": "n", "added": {"later": 1}, "state": "reopened"}
    assert (parse(Whole, newer).id, parse(Whole, newer).state) == ("n", "reopened")
    assert parse(Whole, {"id": "o"}) == Whole(id="o")


def test_answer_without_a_needed_field_names_it() -> None:
    with pytest.raises(KeyError, match="Whole lacks id"):
        parse(Whole, {})
    with pytest.raises(KeyError, match="Part lacks name"):
        parse(Whole, {"id": "a", "parts": [{}]})


class Size(Record):
    width: int


class Entry(Record):
    value: float | Part | Size | None = None


@pytest.mark.parametrize("value", [None, 0.5, Part(name="b", share=0.5), Size(width=3)])
def test_one_of_several_records_is_known_by_its_fields(value: float | Part | Size | None) -> None:
    assert parse(Entry, to_json(Entry(value=value))) == Entry(value=value)


def test_record_is_served_and_stored_as_it_is_read() -> None:
    whole = parse(Whole, SERVED)
    assert to_json(whole) == SERVED
    served = TypeAdapter(Whole)
    assert json.loads(served.dump_json(whole)) == SERVED
    assert served.dump_python(whole, mode="json") == SERVED


def test_schema_has_the_descriptions_and_every_field_that_is_served() -> None:
    schema = TypeAdapter(Whole).json_schema(mode="serialization")
    part = schema["$defs"]["Part"]
    assert part["properties"]["share"]["description"] == "E[d²]"
    assert part["properties"]["share"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert part["required"] == ["name", "share"]
    assert schema["description"] == "An answer."


def test_record_of_a_row_takes_its_attributes_and_what_is_given() -> None:
    row = SimpleNamespace(
        id="a", rate=None, state="open", first={"name": "b"}, parts=[{"name": "c", "share": None}], shares={"d": None}
    )
    whole = from_attributes(Whole, row, mixed=1.5)
    assert whole.first == Part(name="b")
    assert math.isnan(whole.parts[0].share)
    assert math.isnan(whole.shares["d"])
    assert whole.mixed == 1.5
