"""The answer with single tokens, of the declared route and of the one ahead of it."""

from __future__ import annotations

from fastapi import Request, Response

from foreshock_service.platform.columnar.formats import JSON_MEDIA_TYPE, FormatName, choose_format, render
from foreshock_service.platform.columnar.responses import columnar_response
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.security import Principal
from foreshock_service.runs.rollouts.schemas import tokens_json
from foreshock_service.runs.rollouts.tokens import TokenQuery, read_tokens


def answer_tokens(
    context: ServiceContext, request: Request, principal: Principal, query: TokenQuery, format_name: FormatName | None
) -> Response:
    """Return the tokens in the format that is asked for. Raises NotAcceptable, and as `read_tokens`."""
    media_type = choose_format(request.headers.get("accept"), format_name)
    found = read_tokens(context, principal, query)
    body = tokens_json(found) if media_type == JSON_MEDIA_TYPE else render(found.table, media_type)
    return columnar_response(request, body, media_type)
