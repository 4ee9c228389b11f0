"""OpenAPI document that declares every error of every operation by its status, with its problem types."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from foreshock.problem_types import PROBLEM_TYPE_PREFIX
from foreshock_service.platform.problem import PROBLEM_MEDIA_TYPE, ProblemDocument, ProblemError
from foreshock_service.platform.route_problems import Problems, problems_of

_REFERENCE = {"$ref": "#/components/schemas/ProblemDocument"}
_UNCHANGED = {"description": "Unchanged since the answer whose ETag is in If-None-Match"}


def document_problems(app: FastAPI) -> None:
    """Replace the framework's error schemas by the problem document, in the cached OpenAPI document too."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            routes = [route for route in app.routes if isinstance(route, APIRoute)]
            app.openapi_schema = _with_problems(generate(), routes)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _with_problems(document: dict[str, Any], routes: list[APIRoute]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    problem = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["ProblemDocument"] = problem
    for route in routes:
        for method in route.methods:
            operation = document["paths"].get(route.path_format, {}).get(method.lower())
            if operation is None:
                continue
            responses = operation["responses"]
            # The framework's own, with another schema.
            responses.pop("422", None)
            for status, response in _responses(problems_of(route, method, has_body="requestBody" in operation)).items():
                responses.setdefault(status, response)
            if method == "GET" and route.path.startswith("/v1/"):
                responses.setdefault("304", _UNCHANGED)
    return document


def _responses(problems: Problems) -> dict[str, dict[str, Any]]:
    by_status: dict[int, list[type[ProblemError]]] = defaultdict(list)
    for problem in sorted(problems, key=lambda each: (each.status, each.problem_type)):
        by_status[problem.status].append(problem)
    return {str(status): _response(group) for status, group in by_status.items()}


def _response(problems: list[type[ProblemError]]) -> dict[str, Any]:
    names = [PROBLEM_TYPE_PREFIX + each.problem_type for each in problems]
    schema = {"allOf": [_REFERENCE, {"properties": {"type": {"enum": names}}}]}
    text = " ".join(f"`{each.problem_type}`: {_meaning(each)}" for each in problems)
    return {"description": text, "content": {PROBLEM_MEDIA_TYPE: {"schema": schema}}}


def _meaning(problem: type[ProblemError]) -> str:
    return " ".join((problem.__doc__ or "").partition("\n\n")[0].split())
