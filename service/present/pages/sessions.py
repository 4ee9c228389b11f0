"""Who looks at a page: a session made from an API key at /login, or anybody on loopback while there are no keys."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, Form, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.platform.context import Context, ServiceContext
from service.platform.keys.service import Scope
from service.platform.problem import ProblemError
from service.platform.security import (
    SESSION_COOKIE,
    AuthenticationRequired,
    CrossSiteRefused,
    Principal,
    ScopeMissing,
    authenticate,
    principal_of_secret,
)
from service.platform.signing import form_token, is_form_token, sign_session
from service.present.pages.rendering import PAGE_HEADERS, page_response
from service.present.pages.view_models import ProblemPage, Visitor

LONGEST_KEY = 200
_bearer = HTTPBearer(auto_error=False)


@dataclass(frozen=True, slots=True)
class Guest:
    """A principal that may read, and what the templates need to know of it."""

    principal: Principal
    visitor: Visitor


def guest_of(
    request: Request,
    context: Context,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Guest:
    """The dependency of every page; raises AuthenticationRequired (which sends a browser to /login) or ScopeMissing."""
    principal = authenticate(context, request, credentials.credentials if credentials else None)
    if not principal.may(Scope.READ):
        raise ScopeMissing("this key lacks the scope `read`")
    visitor = Visitor(
        signed_in=SESSION_COOKIE in request.cookies and principal.key_id is not None,
        may_answer_alerts=principal.may(Scope.INGEST),
        may_operate=principal.may(Scope.ADMIN),
        csrf_token=csrf_token(context, request),
    )
    return Guest(principal, visitor)


Guests = Annotated[Guest, Depends(guest_of)]


def form_sender(scope: Scope) -> Callable[..., Guest]:
    """The dependency of a form: a guest with this scope, and the token that this guest's own page gave it."""

    def guest_with_token(
        request: Request, context: Context, guest: Guests, csrf_token: Annotated[str, Form(max_length=200)] = ""
    ) -> Guest:
        require_form_token(context, request, csrf_token)
        if not guest.principal.may(scope):
            raise ScopeMissing(f"this key lacks the scope `{scope}`")
        return guest

    return guest_with_token


# The same scopes as the API asks for.
AlertAnswerers = Annotated[Guest, Depends(form_sender(Scope.INGEST))]
Operators = Annotated[Guest, Depends(form_sender(Scope.ADMIN))]


def csrf_token(context: ServiceContext, request: Request) -> str:
    """The token that a form of this visitor carries; without a session it still belongs to this service process."""
    return form_token(context.session_secret, request.cookies.get(SESSION_COOKIE, ""))


def require_form_token(context: ServiceContext, request: Request, token: str) -> None:
    """Raise CrossSiteRefused unless the form came from one of this visitor's own pages."""
    if not is_form_token(context.session_secret, request.cookies.get(SESSION_COOKIE, ""), token):
        raise CrossSiteRefused("this form is not from this session: go back, reload the page and try again")


def sign_in(context: ServiceContext, request: Request, api_key: str, next_path: str) -> Response:
    """A session for the key, then on to the page that was asked for; raises AuthenticationRequired or ScopeMissing."""
    principal = principal_of_secret(context, api_key.strip())
    if not principal.may(Scope.READ):
        raise ScopeMissing("this key lacks the scope `read`")
    response = RedirectResponse(local_path(next_path), status_code=303, headers=PAGE_HEADERS)
    if principal.key_id is not None:
        response.set_cookie(
            SESSION_COOKIE,
            sign_session(context.session_secret, principal.key_id),
            max_age=int(context.settings.session_hours * 3600),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return response


def sign_out() -> Response:
    """To /login, without the session."""
    response = RedirectResponse("/login", status_code=303, headers=PAGE_HEADERS)
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
    return response


def local_path(path: str) -> str:
    """The path, if a browser would take it for one of this service; else the first page."""
    plain = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if plain else "/"


class PageRoute(APIRoute):
    """A route whose errors are pages: whoever must sign in is sent to /login, the rest is said in words."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_pages(request: Request) -> Response:
            try:
                return await handle(request)
            except AuthenticationRequired:
                return RedirectResponse(_login_address(request), status_code=303, headers=PAGE_HEADERS)
            except ProblemError as error:
                return _problem_page(request, error)

        return handle_with_pages


def _login_address(request: Request) -> str:
    if request.method != "GET":
        return "/login"
    asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return f"/login?next={quote(asked, safe='/')}"


def _problem_page(request: Request, error: ProblemError) -> Response:
    page = ProblemPage(error.document().title, error.detail)
    return page_response(request, "problem.html", page, None, status=error.status)
