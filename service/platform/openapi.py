"""OpenAPI document in which every error of every operation is a problem document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from service.platform.problem import PROBLEM_MEDIA_TYPE, ProblemDocument

_REFERENCE = {"$ref": "#/components/schemas/ProblemDocument"}
_UNCHANGED = {"description": "Unchanged since the answer whose ETag is in If-None-Match"}
_METHODS = ("get", "put", "post", "patch", "delete")


def document_problems(app: FastAPI) -> None:
    """Replace the framework's error schemas by the problem document, in the cached OpenAPI document too."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_problems(generate())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    problem = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["ProblemDocument"] = problem
    response = {"description": "Problem", "content": {PROBLEM_MEDIA_TYPE: {"schema": _REFERENCE}}}
    for address, path in document["paths"].items():
        for method in _METHODS:
            if method in path:
                responses = path[method]["responses"]
                if "422" in responses:
                    responses["422"] = response | {"description": "The request does not fit the contract"}
                responses["default"] = response
                if method == "get" and address.startswith("/v1/"):
                    responses.setdefault("304", _UNCHANGED)
    return document
