"""The pages of the HTTP API, from the OpenAPI document of the service."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from foreshock_service.app import create_app
from foreshock_service.platform.settings import Settings

_METHODS: Final = ("get", "put", "post", "patch", "delete")
_HEAD: Final = """# The HTTP API

Generated from the [OpenAPI document](openapi.json) of the service, which a running service gives at `/openapi.json` and
shows at `/docs`. Errors are [problems](../api.md#types-of-problems); [schemas](http-schemas.md) have the fields of
bodies and answers. How to read runs and curves in Python and with curl: [Read the API](../api.md).
"""
_SCHEMAS_HEAD: Final = """# Schemas of the HTTP API

The fields of the JSON bodies and answers of the [HTTP API](http-api.md).
"""


def document() -> dict[str, Any]:
    """Return the OpenAPI document of the service."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(database_url=f"sqlite:///{folder}/foreshock.db", store_url=str(Path(folder) / "tokens"))
        found: dict[str, Any] = create_app(settings).openapi()
    return found


def operations_page(document: dict[str, Any]) -> str:
    """Return the page of the operations: a chapter for each tag, a section for each method and path."""
    chapters: dict[str, list[str]] = defaultdict(list)
    for path, item in document["paths"].items():
        for method in _METHODS:
            if operation := item.get(method):
                tag = (operation.get("tags") or ["service"])[0]
                chapters[tag].append(_operation(method, path, operation))
    parts = [f"## {tag.capitalize()}\n\n" + "\n".join(sections) for tag, sections in sorted(chapters.items())]
    return _HEAD + "\n" + "\n".join(parts)


def schemas_page(document: dict[str, Any]) -> str:
    """Return the page of the schemas: a table of fields for each."""
    parts = [_SCHEMAS_HEAD]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f"## {name}\n\n{_text(schema.get('description'))}\n")
        if fields := schema.get("properties"):
            required = schema.get("required", [])
            rows = [
                f"| `{field}` | {type_of(each)} | {'yes' if field in required else ''} | {_cell(each)} |"
                for field, each in fields.items()
            ]
            parts.append("| field | type | required | |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n")
        elif values := schema.get("enum"):
            parts.append(", ".join(f"`{value}`" for value in values) + "\n")
    return "\n".join(parts)


def type_of(schema: dict[str, Any]) -> str:
    """Return the type of a schema in words, with links to other schemas."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](http-schemas.md#{name.lower()})"
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(type_of(each) for each in alternatives))
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = str(schema.get("type", "any"))
    if kind == "array" and "items" in schema:
        return f"list of {type_of(schema['items'])}"
    return kind


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [f"### `{method.upper()} {path}`", "", _text(operation.get("description") or operation["summary"]), ""]
    if parameters := operation.get("parameters"):
        rows = [
            f"| `{each['name']}` | {each['in']} | {type_of(each['schema'])} | {'yes' if each.get('required') else ''} "
            f"| {_cell(each | {'default': each['schema'].get('default')})} |"
            for each in parameters
        ]
        lines += ["| parameter | in | type | required | |", "| --- | --- | --- | --- | --- |", *rows, ""]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        lines += [f"Body: `{media}`{_of(content)}.", ""]
    rows = [f"| {status} | {_answer(answer)} |" for status, answer in sorted(operation["responses"].items())]
    lines += ["| status | answer |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def _answer(answer: dict[str, Any]) -> str:
    described = _text(answer.get("description")).rstrip(".")
    schemas = dict.fromkeys(
        found for content in answer.get("content", {}).values() if "Problem" not in (found := _of(content))
    )
    return described + "".join(schemas)


def _of(content: dict[str, Any]) -> str:
    schema = content.get("schema") or {}
    return f": {type_of(schema)}" if schema and schema != {"type": "string"} else ""


def _cell(schema: dict[str, Any]) -> str:
    """Return the description of a field or parameter, and its default."""
    default = schema.get("default")
    described = _text(schema.get("description"))
    given = "" if default is None or default == "" else f"default: `{default}`"
    return "; ".join(each for each in (described, given) if each)


def _text(described: str | None) -> str:
    """Return a description as one line that is safe in a table."""
    return " ".join((described or "").split()).replace("|", r"\|").replace("<", "&lt;")
