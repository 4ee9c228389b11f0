"""Sessions of the pages, created from an API key at /login. On loopback, no session is needed while no key exists."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import Depends, Form, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from foreshock import page_addresses
from foreshock_service.platform import parameters, problem, request_guards, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.present.pages import rendering
from foreshock_service.present.pages.figures import Figure, Missing
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.runs.runs import RunDeleted, RunNotFound

LONGEST_KEY = 200
_MOST_FAULTS = 3
_OF_RUNS = (RunNotFound.problem_type, RunDeleted.problem_type)
"""Problems after which there is no page of the run."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PageSession:
    """A page request of a principal that may read, and the visitor that templates see."""

    request: Request
    context: ServiceContext
    principal: security.Principal
    view: rendering.Visitor

    def look(self, read: Callable[..., Result], *arguments: object) -> Result:
        """Return `read(viewing, *arguments)`; the database session is closed before the response is sent."""
        with self.context.database.read() as session:
            return read(Viewing(self.context, session, self.principal), *arguments)

    def figure(self, present: Callable[..., Figure | Missing], *arguments: object) -> Response:
        """Return the presenter's figure as JSON for `static/page.js`."""
        return rendering.json_response(self.request, self.look(present, *arguments).to_json())

    def page(self, template: str, present: Callable[..., object], *arguments: object) -> Response:
        """Return a page or a part of one, rendered from the presenter's answer."""
        return rendering.page_response(self.request, template, self.look(present, *arguments), self.view)


def page_session(request: Request, context: Context) -> PageSession:
    """Return the session of a request to a page. Raises AuthenticationRequired or ScopeMissing."""
    principal = security.authenticate(context, request)
    security.check_scope(principal, security.Scope.READ)
    visitor = rendering.Visitor(
        signed_in=security.SESSION_COOKIE in request.cookies and principal.key_id is not None,
        may_answer_alerts=principal.may(security.Scope.INGEST),
        may_operate=principal.may(security.Scope.ADMIN),
        # Without a session, the token is derived from an empty cookie.
        csrf_token=security.form_token(context.session_secret, request.cookies.get(security.SESSION_COOKIE, "")),
    )
    return PageSession(request, context, principal, visitor)


ReaderSession = Annotated[PageSession, Depends(page_session)]


def form_sender(scope: security.Scope) -> Callable[..., PageSession]:
    """Return the dependency of a form: it requires the scope and the form token of the same session."""

    def session_with_token(
        request: Request,
        context: Context,
        session: ReaderSession,
        csrf_token: Annotated[str, Form(max_length=200)] = "",
    ) -> PageSession:
        require_form_token(context, request, csrf_token)
        security.check_scope(session.principal, scope)
        return session

    return session_with_token


# Forms require the same scopes as the API.
IngesterSession = Annotated[PageSession, Depends(form_sender(security.Scope.INGEST))]
OperatorSession = Annotated[PageSession, Depends(form_sender(security.Scope.ADMIN))]


def require_form_token(context: ServiceContext, request: Request, token: str) -> None:
    """Raise CrossSiteRefused unless the form came from a page of the same session."""
    if not security.is_form_token(context.session_secret, request.cookies.get(security.SESSION_COOKIE, ""), token):
        raise request_guards.CrossSiteRefused("this form is of another session; reload the page and try again")


def sign_in(context: ServiceContext, request: Request, api_key: str, next_path: str) -> Response:
    """Create a session from an API key and redirect to the page. Raises AuthenticationRequired or ScopeMissing."""
    principal = security.principal_of_secret(context, api_key.strip())
    security.check_scope(principal, security.Scope.READ)
    response = RedirectResponse(local_path(next_path), status_code=303, headers=rendering.PAGE_HEADERS)
    if principal.key_id is not None:
        response.set_cookie(
            security.SESSION_COOKIE,
            security.sign_session(context.session_secret, principal.key_id),
            max_age=security.SESSION_SECONDS,
            httponly=True,
            samesite="strict",
            # uvicorn trusts a proxy's scheme only on its own machine, but in Compose the proxy is another container.
            # Here the header may be trusted from anyone: it only makes the sender's own cookie stricter.
            secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto", "").strip().lower()),
        )
    return response


def sign_out(context: ServiceContext, request: Request) -> Response:
    """End the session, including copies of its cookie, and redirect to /login."""
    security.end_session(context.database, context.session_secret, request.cookies.get(security.SESSION_COOKIE, ""))
    response = RedirectResponse("/login", status_code=303, headers=rendering.PAGE_HEADERS)
    response.delete_cookie(security.SESSION_COOKIE, httponly=True, samesite="strict")
    return response


def local_path(path: str) -> str:
    """Return the path if it leads to a page of this service; else "/"."""
    plain = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if plain else "/"


class PageRoute(APIRoute):
    """A route whose errors are pages; without a session it redirects to /login."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_pages(request: Request) -> Response:
            try:
                return await handle(request)
            except security.AuthenticationRequired:
                asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                address = f"/login?next={quote(asked, safe='/')}" if request.method == "GET" else "/login"
                return RedirectResponse(address, status_code=303, headers=rendering.PAGE_HEADERS)
            except problem.ProblemError as error:
                return _problem_page(request, error)
            except RequestValidationError as error:
                found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
                return _problem_page(request, problem.InvalidRequest("; ".join(found[:_MOST_FAULTS])))

        return handle_with_pages


def unknown_address(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown address: with a page for a browser, else with a problem document."""
    asks_for_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/v1/")
    if not asks_for_page:
        return problem.answer_error(request, error)
    page = {
        "title": "There is no such page",
        "detail": f"{request.url.path} is no address of this service.",
        "back": None,
    }
    return rendering.page_response(request, "problem.html", page, None, status=404)


def _problem_page(request: Request, error: problem.ProblemError) -> Response:
    back, named = None, [request.path_params.get(part) for part in ("project", "key")]
    if all(named) and error.problem_type not in _OF_RUNS:
        back = page_addresses.run_page_path(*(parameters.decoded_segment(str(part)) for part in named))
    page = {"title": error.document().title, "detail": error.detail, "back": back}
    return rendering.page_response(request, "problem.html", page, None, status=error.status)
