"""Documents keep their links in the site, and generated pages have every name that the code has."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from foreshock.commands.main import ENTRY_POINT_GROUP
from scripts.documentation import command_lines, http_api, python_reference
from scripts.documentation.sources import moved


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return http_api.document()


@pytest.mark.parametrize(
    ("name", "place", "text", "expected"),
    [
        ("README.md", "index.md", "[a](docs/api.md)", "[a](api.md)"),
        ("README.md", "index.md", "![a](docs/images/run.png)", "![a](images/run.png)"),
        ("README.md", "index.md", "[a](docs/early-warning.md#fields)", "[a](early-warning.md#fields)"),
        ("CONTRIBUTING.md", "contributing.md", "[a](README.md)", "[a](index.md)"),
        ("examples/tiny_rl/README.md", "examples/tiny_rl/README.md", "[a](../../docs/api.md)", "[a](../../api.md)"),
        ("README.md", "index.md", "[a](https://example.org)", "[a](https://example.org)"),
        ("README.md", "index.md", "[a](#two-commands)", "[a](#two-commands)"),
        ("README.md", "index.md", "[a](Makefile)", "[a](Makefile)"),
    ],
)
def test_links_lead_to_the_same_document(name: str, place: str, text: str, expected: str) -> None:
    assert moved(text, name, place) == expected


def test_page_of_http_has_every_operation_and_parameter(document: dict[str, Any]) -> None:
    page = http_api.operations_page(document)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            section = page.partition(f"### `{method.upper()} {path}`\n")[2].partition("\n### ")[0]
            assert section, (method, path)
            assert all(f"| `{each['name']}` |" in section for each in operation.get("parameters", [])), (method, path)
            assert all(f"| {status} |" in section for status in operation["responses"]), (method, path)


def test_page_of_schemas_has_every_field(document: dict[str, Any]) -> None:
    page = http_api.schemas_page(document)
    for name, schema in document["components"]["schemas"].items():
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert all(f"| `{field}` |" in section for field in schema.get("properties", {})), name


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "integer"),
        ({"type": "array", "items": {"type": "number"}}, "list of number"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"$ref": "#/components/schemas/RunRead"}, "[RunRead](http-schemas.md#runread)"),
        ({"enum": ["json", "csv"], "type": "string"}, "`json`, `csv`"),
    ],
)
def test_types_are_told_in_words(schema: dict[str, Any], expected: str) -> None:
    assert http_api.type_of(schema) == expected


def test_page_of_commands_has_every_command_and_action() -> None:
    page = command_lines.page()
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        assert f"## foreshock {point.name}\n" in page
    assert "usage: foreshock keys rotate" in page
    assert "--step N" in page


def test_page_of_python_has_every_public_name_once() -> None:
    page = python_reference.page()
    places = [line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")]
    assert len(places) == len(set(places))
    for module in python_reference.MODULES:
        for name in python_reference.public_names(module):
            assert f".{name}\n" in page or f".{name}`]" in page, (module, name)
