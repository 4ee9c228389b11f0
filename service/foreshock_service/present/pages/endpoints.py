"""HTTP: the pages, the parts that the browser fetches later, forms, and static files."""

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Form, Path, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import StringConstraints
from starlette.exceptions import HTTPException

from foreshock import page_addresses, probe_kinds
from foreshock.learning_rate.modes import Lever
from foreshock_service.platform import pagination, parameters, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.present.pages import rendering, sessions
from foreshock_service.present.pages.presenters import (
    alerts,
    attribution,
    certificates,
    compare,
    figures,
    report,
    rollout,
    run_list,
    saved,
)
from foreshock_service.present.pages.presenters.run import probes_part, run_page, scalars_part, semantics_part
from foreshock_service.present.pages.presenters.run_list import Text
from foreshock_service.present.pages.presenters.step import step_page, worst_tokens
from foreshock_service.replay.certificates import Identifier
from foreshock_service.replay.probes import schemas, service
from foreshock_service.runs.runs import RunIdentifier, RunOfPage, RunUpdate, get_run, id_of_key, update_run
from foreshock_service.watch.advice.schemas import OperatorDecisionCreate
from foreshock_service.watch.advice.service import operate
from foreshock_service.watch.alerts import AlertIdentifier, answer

# Pages are for people, so the OpenAPI document leaves them out.
pages = APIRouter(route_class=sessions.PageRoute, include_in_schema=False)
parts = APIRouter(prefix="/pages", include_in_schema=False)
static = APIRouter(include_in_schema=False)
ROUTERS = (static, parts, pages)
LONGEST_SAMPLE_ID = 1024
ComparedRuns = Annotated[Sequence[Annotated[str, StringConstraints(pattern=parameters.NO_NUL)]], Query(max_length=100)]


@pages.get("/")
def show_runs(visitor: sessions.ReaderSession, query: Annotated[run_list.RunsQuery, Depends()]) -> Response:
    return visitor.page("runs.html", run_list.runs_page, query)


@pages.get("/alerts")
def show_alerts(
    visitor: sessions.ReaderSession,
    cursor: pagination.Cursor = None,
    state: Text = "open",
    severity: Text = "",
) -> Response:
    return visitor.page("alerts.html", alerts.alerts_page, state, severity, cursor)


@pages.get("/compare")
def show_comparison(visitor: sessions.ReaderSession, run: ComparedRuns = ()) -> Response:
    return visitor.page("compare.html", compare.compare_page, run)


@pages.get("/certificates")
def show_certificates(visitor: sessions.ReaderSession, cursor: pagination.Cursor = None) -> Response:
    return visitor.page("certificates.html", certificates.certificates_page, cursor)


@pages.get("/certificates/{certificate}")
def show_certificate(certificate: Identifier, visitor: sessions.ReaderSession, against: Text = "") -> Response:
    return visitor.page("certificate.html", certificates.certificate_page, certificate, against)


@parts.get("/compare/{name}.json")
def comparison_figure(name: str, visitor: sessions.ReaderSession, run: ComparedRuns = ()) -> Response:
    return visitor.figure(compare.compared_figure, name, run)


@pages.get("/runs/{run}")
def show_run(run: RunIdentifier, visitor: sessions.ReaderSession) -> Response:
    return visitor.page("run.html", run_page, run)


@pages.get("/runs/{project}/{key}")
def show_run_of_project(run: RunOfPage, visitor: sessions.ReaderSession) -> Response:
    return visitor.page("run.html", run_page, run)


@pages.get("/runs/{run}/steps/{step}")
def show_step(run: RunIdentifier, step: parameters.StepPath, visitor: sessions.ReaderSession) -> Response:
    return visitor.page("step.html", step_page, run, step)


@pages.get("/runs/{project}/{key}/steps/{step}")
def show_step_of_project(run: RunOfPage, step: parameters.StepPath, visitor: sessions.ReaderSession) -> Response:
    return visitor.page("step.html", step_page, run, step)


@pages.get("/runs/{project}/{key}/steps/{step}/rollouts/{sample_id}")
def show_rollout(
    run: RunOfPage,
    step: parameters.StepPath,
    sample_id: Annotated[str, Path(max_length=LONGEST_SAMPLE_ID, pattern=parameters.SEGMENT_PATTERN)],
    visitor: sessions.ReaderSession,
) -> Response:
    return visitor.page("rollout.html", rollout.rollout_page, run, step, parameters.decoded_segment(sample_id))


@pages.post("/runs/{run}/advice")
def decide(
    run: RunIdentifier,
    context: Context,
    visitor: sessions.OperatorSession,
    kind: Annotated[Literal["hold", "release", "raise", "halve", "apply", "shadow"], Form()],
    reason: Annotated[parameters.Name, Form()],
    lever: Lever = "rate",
    seen_revision: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
) -> Response:
    if kind == "apply" or kind == "shadow":
        change = RunUpdate.model_validate({"advice_mode" if lever == "rate" else f"{lever}_mode": kind})
        context.database.write(
            lambda session: update_run(session, context.events, visitor.principal, run, change, reason)
        )
    else:
        decision = OperatorDecisionCreate(lever=lever, kind=kind, reason=reason, seen_revision=seen_revision)
        context.database.write(lambda session: operate(session, visitor.principal, run, decision))
    return back_to_run(context, visitor, run)


@pages.post("/runs/{run}/alerts/{alert}/acknowledge")
def acknowledge_alert(
    run: RunIdentifier, alert: AlertIdentifier, context: Context, visitor: sessions.IngesterSession
) -> Response:
    context.database.write(lambda session: answer(session, visitor.principal, run, alert, "acknowledge"))
    return back_to_run(context, visitor, run)


@pages.post("/runs/{run}/alerts/{alert}/resolve")
def resolve_alert(
    run: RunIdentifier,
    alert: AlertIdentifier,
    context: Context,
    visitor: sessions.IngesterSession,
    reason: Annotated[parameters.Name, Form()],
) -> Response:
    context.database.write(lambda session: answer(session, visitor.principal, run, alert, "resolve", reason))
    return back_to_run(context, visitor, run)


@pages.post("/runs/{run}/notes")
def write_notes(
    run: RunIdentifier,
    context: Context,
    visitor: sessions.IngesterSession,
    tags: Annotated[str, Form(max_length=2000)] = "",
    note: Annotated[str, Form(max_length=2000)] = "",
    baseline: Annotated[str, Form(max_length=200)] = "",
) -> Response:
    with context.database.read() as session:
        named = baseline.strip()
        found = id_of_key(session, visitor.principal, None, named) if named and not named.startswith("run_") else named
    change = RunUpdate(
        tags=[tag.strip() for tag in tags.split(",") if tag.strip()], note=note.strip() or None, baseline=found or None
    )
    context.database.write(lambda session: update_run(session, context.events, visitor.principal, run, change))
    return back_to_run(context, visitor, run)


@pages.post("/runs/{run}/steps/{step}/doctor")
def examine_step(
    run: RunIdentifier, step: parameters.StepPath, context: Context, visitor: sessions.IngesterSession
) -> Response:
    service.request_probe(context, visitor.principal, run, schemas.ProbeCreate(step=step, kind=probe_kinds.DOCTOR.name))
    return RedirectResponse(f"/runs/{run}/steps/{step}", status_code=303, headers=rendering.PAGE_HEADERS)


def back_to_run(context: ServiceContext, visitor: sessions.PageSession, run_id: str) -> Response:
    """Redirect to the page of the run, so that reloading it does not send the form again."""
    with context.database.read() as session:
        run = get_run(session, visitor.principal, run_id)
        address = page_addresses.run_page_path(run.project, run.key)
    return RedirectResponse(address, status_code=303, headers=rendering.PAGE_HEADERS)


@parts.get("/runs/{run}/figures/{name}.json")
def run_figure(
    run: RunIdentifier, name: str, visitor: sessions.ReaderSession, asked: Annotated[figures.Asked, Depends()]
) -> Response:
    return visitor.figure(figures.run_figure, run, name, asked)


@parts.get("/runs/{run}/file")
def run_file(run: RunIdentifier, context: Context, visitor: sessions.ReaderSession) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{run}.html"'}
    page = visitor.look(saved.saved_run, run, _origin(context, visitor.request))
    return rendering.html_response(visitor.request, page, headers)


@parts.get("/runs/{run}/text")
def run_text(
    run: RunIdentifier,
    context: Context,
    visitor: sessions.ReaderSession,
    step: Annotated[int | None, Query(ge=0, le=parameters.LARGEST_STEP)] = None,
    whole: bool = False,
) -> Response:
    origin = _origin(context, visitor.request)
    text = visitor.look(report.report_of_run, run, step, whole, origin)
    return Response(text, media_type="text/plain; charset=utf-8", headers=rendering.PAGE_HEADERS)


def _origin(context: ServiceContext, request: Request) -> str:
    return context.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")


@parts.get("/runs/{run}/probes")
def run_probes(run: RunIdentifier, visitor: sessions.ReaderSession) -> Response:
    return visitor.page("probes.html", probes_part, run)


@parts.get("/runs/{run}/semantics")
def run_semantics(run: RunIdentifier, visitor: sessions.ReaderSession) -> Response:
    return visitor.page("semantics.html", semantics_part, run)


@parts.get("/runs/{run}/scalars")
def run_scalars(run: RunIdentifier, visitor: sessions.ReaderSession, name: Text = "") -> Response:
    return visitor.page("scalars.html", scalars_part, run, name)


@parts.get("/runs/{run}/axes.json")
def run_axes(run: RunIdentifier, visitor: sessions.ReaderSession) -> Response:
    """Return what a run's curves can be drawn over besides the step: cumulative learning rate, and time."""
    return rendering.json_response(visitor.request, visitor.look(alerts.axes_of_run, run))


@parts.get("/runs/{run}/steps/{step}/figures/{name}.json")
def step_figure(run: RunIdentifier, step: parameters.StepPath, name: str, visitor: sessions.ReaderSession) -> Response:
    return visitor.figure(figures.step_figure, run, step, name)


@parts.get("/runs/{run}/steps/{step}/tokens")
def step_tokens(run: RunIdentifier, step: parameters.StepPath, visitor: sessions.ReaderSession) -> Response:
    return visitor.page("tokens.html", worst_tokens, run, step)


@parts.get("/runs/{run}/steps/{step}/rollout")
def rollout_tokens(
    run: RunIdentifier,
    step: parameters.StepPath,
    sample_id: Annotated[str, Query(max_length=LONGEST_SAMPLE_ID)],
    visitor: sessions.ReaderSession,
) -> Response:
    return rendering.json_response(visitor.request, visitor.look(rollout.rollout_columns, run, step, sample_id))


@parts.get("/runs/{run}/steps/{step}/corrections")
def step_corrections(run: RunIdentifier, step: parameters.StepPath, visitor: sessions.ReaderSession) -> Response:
    return visitor.page("corrections.html", attribution.corrections_part, run, step)


@pages.get("/login")
def show_login(request: Request, next_path: Annotated[str, Query(alias="next", max_length=2000)] = "/") -> Response:
    page = {"next": sessions.local_path(next_path), "error": None}
    return rendering.page_response(request, "login.html", page, None)


@pages.post("/login")
def log_in(
    request: Request,
    context: Context,
    api_key: Annotated[str, Form(max_length=sessions.LONGEST_KEY)],
    next_path: Annotated[str, Form(alias="next", max_length=2000)] = "/",
) -> Response:
    """Exchange an API key for a session. Forms of other sites were refused by their Origin before."""
    try:
        return sessions.sign_in(context, request, api_key, next_path)
    except (security.AuthenticationRequired, security.ScopeMissing) as error:
        page = {"next": sessions.local_path(next_path), "error": f"{error.detail}."}
        return rendering.page_response(request, "login.html", page, None, status=error.status)


@pages.post("/logout")
def log_out(request: Request, context: Context, csrf_token: Annotated[str, Form(max_length=200)] = "") -> Response:
    sessions.require_form_token(context, request, csrf_token)
    return sessions.sign_out(context, request)


@static.get("/static/{name}")
def static_file(request: Request, name: str, v: str = "") -> Response:
    """Return a static file; browsers keep it for a year if the address has its version."""
    found = rendering.assets().get(name)
    if found is None:
        raise HTTPException(404, "no such file")
    cache = rendering.LONG_CACHE if v == rendering.digest_of(name) else rendering.REVALIDATE
    headers = {"Cache-Control": cache, "X-Content-Type-Options": "nosniff", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        found, headers["Content-Encoding"] = rendering.compressed(name), "gzip"
    return Response(found, media_type=rendering.MEDIA_TYPES[name[name.rindex(".") :]], headers=headers)
