"""HTTP: the page of a run's rules and its forms, with the scopes of `PUT /v1/runs/{run}/rules`."""

from typing import Annotated, Literal

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from foreshock.diagnosis.rule import Effect
from foreshock.diagnosis.rule_files import LARGEST_TEXT
from foreshock.page_addresses import run_page_path
from foreshock.severity import Severity
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.parameters import LARGEST_STEP, Name
from foreshock_service.present.pages import rendering, sessions
from foreshock_service.present.pages.presenters.advice import rules_page
from foreshock_service.present.pages.presenters.viewing import open_viewing
from foreshock_service.runs.run_endpoints import RunIdentifier, RunOfPage
from foreshock_service.runs.runs import get_run
from foreshock_service.watch.rules.service import change_rule, set_rules

router = APIRouter(route_class=sessions.PageRoute, include_in_schema=False)
Number = Annotated[float | None, Form()]


@router.get("/runs/{project}/{key}/rules")
def show_rules(run: RunOfPage, request: Request, context: Context, visitor: sessions.ReaderSession) -> Response:
    """Return the page of the rules that watch a run."""
    with open_viewing(context, visitor.principal) as viewing:
        page = rules_page(viewing, run)
    return rendering.page_response(request, "rules.html", page, visitor.view)


@router.post("/runs/{run}/rules/{rule}")
def change_one_rule(
    run: RunIdentifier,
    rule: str,
    context: Context,
    visitor: sessions.OperatorSession,
    action: Annotated[Literal["change", "disable", "default"], Form()],
    first_step: Annotated[int, Form(ge=0, le=LARGEST_STEP)],
    reason: Annotated[Name, Form()],
    absolute: Number = None,
    relative: Number = None,
    minimum_duration: Annotated[int | None, Form()] = None,
    severity: Annotated[Severity | None, Form()] = None,
    effect: Annotated[Effect | None, Form()] = None,
) -> Response:
    """Change, disable or reset one rule from a step on, then redirect to the run's rules."""
    entered = {
        "absolute": absolute, "relative": relative, "minimum_duration": minimum_duration,
        "severity": severity, "effect": effect,
    }  # fmt: skip
    given = {name: value for name, value in entered.items() if value is not None}
    values = {"change": given, "disable": None, "default": {}}[action]
    context.database.write(
        lambda session: change_rule(session, context.events, visitor.principal, run, rule, values, first_step, reason)
    )
    return _back(context, visitor, run)


@router.post("/runs/{run}/rules")
def change_rules(
    run: RunIdentifier,
    context: Context,
    visitor: sessions.OperatorSession,
    toml: Annotated[str, Form(max_length=2 * LARGEST_TEXT)],
    reason: Annotated[Name, Form()],
) -> Response:
    """Set a file of rules, then redirect to the run's rules."""
    # A form sends its lines with carriage returns.
    text = toml.replace("\r\n", "\n")
    context.database.write(lambda session: set_rules(session, context.events, visitor.principal, run, text, reason))
    return _back(context, visitor, run)


def _back(context: ServiceContext, visitor: sessions.PageSession, run_id: str) -> Response:
    with context.database.read() as session:
        run = get_run(session, visitor.principal, run_id)
        address = f"{run_page_path(run.project, run.key)}/rules"
    return RedirectResponse(address, status_code=303, headers=rendering.PAGE_HEADERS)
