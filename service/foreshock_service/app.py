"""The application: its long-lived parts, its routers, and the shape of its errors.

`create_app(settings)` opens the database and the token store but migrates nothing; `foreshock serve` does.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool

from foreshock.clock import now_us
from foreshock_service.maintenance import delete_runs, retention
from foreshock_service.platform import health, keys, problem, process, request_guards, security, uploads
from foreshock_service.platform.context import EventBus, ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.jobs import Job, JobRunner
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.removal import remove_due_files, remove_orphans
from foreshock_service.platform.store.tokens import open_store
from foreshock_service.present.exporter import collector as exporter
from foreshock_service.present.pages.endpoints import ROUTERS as PAGES
from foreshock_service.present.pages.sessions import unknown_address
from foreshock_service.replay import certificates, leases
from foreshock_service.replay.attribution import service as attribution
from foreshock_service.replay.probes import policies, service, workers
from foreshock_service.replay.results import publishing
from foreshock_service.replay.results.scores import read_replayed_scores
from foreshock_service.runs import (
    attempts,
    changes,
    checkpoints,
    corrections,
    curves,
    events,
    findings,
    ingest,
    lint,
    measurements,
    runs,
    scalars,
    shard_decoding,
    steps,
    tokens,
    weights,
)
from foreshock_service.runs.failing_runs import alert_of_unreadable_runs, isolated
from foreshock_service.watch import advance, alerts, delivery, diagnosis, long_polls, rules
from foreshock_service.watch.advice import endpoints as advice
from foreshock_service.watch.advice.service import record_mode, rewind_log
from foreshock_service.watch.detection import derivation, history
from foreshock_service.watch.notifications.service import notifiers

# The routers of every noun. The routers of pages follow them, since their paths match the most.
_NOUNS: tuple[Any, ...] = (
    *(health, runs, attempts, steps, ingest, tokens, scalars, changes, checkpoints, curves, lint),
    *(findings, service, policies, leases, publishing, attribution, workers, exporter, alerts, rules),
    *(advice, diagnosis, corrections, weights, certificates),
)
ROUTERS: tuple[APIRouter, ...] = tuple(noun.router for noun in _NOUNS)


def api_routes() -> list[APIRoute]:
    """Return the routes of the API, without the pages."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def create_app(settings: Settings, decoders: DecoderPool | None = None) -> FastAPI:
    """Return the application for these settings; `decoders` lets several applications of one process share a pool."""
    # FastAPIOffline serves the documentation page's script itself, because clusters often cannot reach a CDN.
    app = FastAPIOffline(
        redoc_url=None,
        title="Foreshock",
        description="The seismograph of LLM reinforcement learning: runs, rollouts, measurements, alerts and advice.",
        version=version("foreshock"),
        lifespan=_lifespan,
        # A generator of clients would make two classes of one name of a schema for input and one for output.
        separate_input_output_schemas=False,
    )
    app.state.context = context = _make_context(settings, decoders)
    app.state.advancing = advance.Advancing(context)
    app.state.attributing = attribution.Attributing(context)
    app.state.owns_decoders = decoders is None
    app.state.long_polls = long_polls.LongPolls(app.state.context.database)
    problem.install_problem_handlers(app)
    app.add_exception_handler(404, unknown_address)
    # Routes hold no state of an application, so that all applications of one process can share them.
    app.router.routes.extend(route for router in (*ROUTERS, *PAGES) for route in router.routes)
    # The middleware that is added last runs first.
    app.add_middleware(
        request_guards.RequestGuard, settings=settings, authenticate=partial(security.authenticate, context)
    )
    app.add_middleware(request_guards.RequestIds, log_requests=settings.log_requests)
    problem.document_problems(app)
    return app


def _make_context(settings: Settings, decoders: DecoderPool | None) -> ServiceContext:
    secret = settings.session_secret.get_secret_value() if settings.session_secret else secrets.token_urlsafe(32)
    return ServiceContext(
        settings=settings,
        database=Database(
            settings.database_url,
            connections=settings.connections_per_process,
            session_info={rules.SESSION_KEY: rules.rules_of_settings(settings)},
        ),
        store=open_store(settings),
        decoders=decoders or DecoderPool(settings, shard_decoding.PRELOAD),
        uploads=uploads.UploadPlaces(
            settings.decode_processes + settings.decode_queue,
            most_of_one_key=settings.key_uploads,
            folders=uploads.folders_to_watch(settings),
        ),
        key_limits=keys.KeyLimits(settings.key_requests_per_second),
        session_secret=secret.encode(),
        events=subscribe_handlers(EventBus()),
        replayed_scores=read_replayed_scores,
    )


def subscribe_handlers(bus: EventBus) -> EventBus:
    """Subscribe every handler; those of one event run in the order in which they are listed here.

    What follows from a run's data is none of these: `watch/advance.py` works it out after the commit.
    """
    bus.subscribe(events.AttemptStarted, alerts.resolve_superseded)
    bus.subscribe(events.AttemptStarted, delivery.forget_superseded)
    bus.subscribe(events.AttemptStarted, findings.forget_superseded)
    bus.subscribe(events.AttemptStarted, measurements.forget_superseded)
    bus.subscribe(events.AttemptStarted, isolated(bus, rewind_log))
    bus.subscribe(events.AttemptStarted, derivation.derive_after_resume)
    bus.subscribe(events.ScalarsLogged, isolated(bus, history.observe_scalars))
    bus.subscribe(events.StepClosed, delivery.alert_of_incomplete_step)
    bus.subscribe(events.StepClosed, attribution.mark_stale_after_late_rollouts)
    bus.subscribe(events.TrainerHeard, delivery.end_silence)
    bus.subscribe(events.RunBecameStale, delivery.alert_of_silence)
    bus.subscribe(events.RunFailed, delivery.alert_of_failure)
    bus.subscribe(events.ItemsLost, delivery.alert_of_losses)
    bus.subscribe(events.AdviceModeChanged, record_mode)
    bus.subscribe(publishing.ScoresPublished, attribution.mark_attribution_stale)
    bus.subscribe(events.RunRemoved, service.cancel_jobs_of_run)
    return bus


def _frequent_jobs(context: ServiceContext) -> list[Job]:
    started = now_us()
    return [
        Job("mark_waiting_runs", lambda: advance.mark_waiting_runs(context)),
        Job("close_scalar_tails", lambda: history.close_scalar_tails(context)),
        Job("mark_stale_runs", lambda: runs.mark_stale_runs(context, started)),
        Job("expire_leases", lambda: leases.sweep(context)),
        Job("make_automatic_probes", lambda: policies.make_automatic_probes(context)),
        Job("remove_old_temporaries", context.store.remove_old_temporaries, shared=False, every_seconds=600.0),
        Job("alert_of_unreadable_runs", lambda: alert_of_unreadable_runs(context), shared=False),
        Job("write_uses_of_keys", lambda: context.key_uses.write(context.database), shared=False),
    ]


def _long_jobs(context: ServiceContext) -> list[Job]:
    settings, store, database = context.settings, context.store, context.database

    def go_on() -> bool:
        return not context.stopping.is_set()

    return [
        Job("delete_rows_of_deleted_runs", lambda: delete_runs.delete_rows_of_deleted_runs(context, go_on=go_on)),
        Job("remove_due_files", lambda: remove_due_files(database, store)),
        Job(
            "purge_tokens",
            lambda: retention.purge_all(context, go_on),
            every_seconds=settings.retention_interval_seconds,
        ),
        Job(
            "remove_orphans",
            lambda: remove_orphans(store, database, settings.orphan_grace_seconds, go_on),
            every_seconds=settings.orphan_grace_seconds / 24,
        ),
    ]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: ServiceContext = app.state.context
    jobs = JobRunner("jobs", context.database, _frequent_jobs(context), context.settings.sweep_interval_seconds)
    if not context.decoders.is_warm:
        # Compiling takes a while: /readyz reports when the decoders have started, and uploads wait until then.
        context.decoders.warm_up_in_background()
    # In a runner of their own: these jobs may take long, and the others must not wait for them.
    cleaning = JobRunner("cleaning", context.database, _long_jobs(context), context.settings.sweep_interval_seconds)
    advancing: advance.Advancing = app.state.advancing
    seen = (jobs, cleaning, advancing.runner, app.state.attributing)
    runners = [*seen, *notifiers(context)]
    for runner in runners:
        runner.start()
    polls: long_polls.LongPolls = app.state.long_polls
    polls.start()
    app.state.metrics = metrics = health.ServiceMetrics(context, seen, polls.count)
    watching = asyncio.create_task(metrics.watch_loop())

    def begin_to_stop() -> None:
        context.stopping.set()
        polls.release()

    app.state.begin_to_stop = begin_to_stop
    process.handle_signals(partial(asyncio.get_running_loop().call_soon_threadsafe, begin_to_stop))
    try:
        yield
    finally:
        begin_to_stop()
        watching.cancel()
        await polls.stop()
        for runner in runners:
            await run_in_threadpool(runner.stop)
        await run_in_threadpool(context.key_uses.write, context.database)
        if app.state.owns_decoders:
            await run_in_threadpool(context.decoders.close)
        await run_in_threadpool(context.database.close)
