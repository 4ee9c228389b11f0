"""`foreshock probe`: request the replay of a step, and wait for its result.

`foreshock probe cancel ID` cancels a probe.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from foreshock.api.probes import PriorityName
from foreshock.client.reader import Reader
from foreshock.commands.command import Command, add_run_argument, add_service_options, connect
from foreshock.commands.option_types import COUNT, SECONDS, STEP
from foreshock.commands.queries import find_run, wait_for_attribution
from foreshock.commands.text import table, wrap
from foreshock.comparisons import comparison_name
from foreshock.errors import ConfigurationError, ServiceUnavailable
from foreshock.probe_kinds import DOCTOR, EXACT, LAYERS, PROBE_KINDS, ProbeKind
from foreshock.scorers import EXACT_PAIRS, default_scorers, noise_floor_scorers, split_score_name

# The scorer that computes what the trainer logged.
_TRAINER_REPLAY = noise_floor_scorers("trainer")[0]
_CANCEL, _PROBE_IDS = "cancel", "probe_"
_FINAL = frozenset({"done", "failed", "skipped"})
_WORKER_SECONDS = 5.0
"""Time for a worker that was started just before."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, required=True)
    parser.add_argument(
        "step",
        type=_step_or_probe,
        metavar="STEP",
        help=f"a step with an announced checkpoint; `foreshock probe {_CANCEL} ID` cancels the probe with this id",
    )
    parser.add_argument(
        "--scorer",
        action="append",
        metavar="NAME[@VARIANT]",
        help=f"may be repeated (default: {', '.join(default_scorers())})",
    )
    parser.add_argument("--accelerator", help="run only on workers with this accelerator, such as cpu or H100")
    parser.add_argument(
        "--environment",
        metavar="NAME",
        help="score in this environment only: a name that workers offer, such as avx2; run: the run's own; any: as "
        "the worker is (default: the run's own if the worker offers it, else any)",
    )
    parser.add_argument(
        "--priority",
        choices=get_args(PriorityName),
        help="which probe workers take first (default: urgent near an open alert, else normal)",
    )
    parser.add_argument("--max-rollouts", type=COUNT, metavar="N", help="score a sample of N rollouts")
    parser.add_argument(
        "--trainer-autocast", choices=("bfloat16", "none"), help=f"how {_TRAINER_REPLAY} runs its forward pass"
    )
    parser.add_argument(
        "--trainer-master-dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the trainer's weights in the forward pass",
    )
    for kind in PROBE_KINDS.values():
        parser.add_argument(f"--{kind.name}", action="store_true", help=kind.flag_help())
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the result")
    parser.add_argument(
        "--timeout", type=SECONDS, default=600.0, metavar="SECONDS", help="longest wait for the result (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Request, wait, print. Exit status 1 if the probe failed, was skipped or took too long."""
    if isinstance(arguments.step, str):
        return _cancel(arguments)
    with connect(arguments) as reader:
        run = find_run(reader, arguments.run)
        body = _request(arguments)
        answer = reader.connection.request("POST", f"/v1/runs/{run.id}/probes", json_body=body)
        probe = reader.connection.decoded(answer)
        if not arguments.no_wait:
            probe = wait_for_probe(reader, probe, arguments.timeout)
        kind = _kind(arguments)
        is_done = probe["state"] == "done"
        result: list[str] = []
        if is_done and kind.report:
            path = f"/v1/runs/{run.id}/steps/{probe['step']}/{kind.name}"
            query = {"attempt": probe["attempt"]}
            if kind is LAYERS:
                query["pair"] = comparison_name(*(each["scorer"] for each in probe["scorers"]))
            module, _, function = kind.report.partition(":")
            found = reader.connection.get_json(path, query=query)
            result = getattr(importlib.import_module(module), function)(found, probe)
        elif is_done:
            # The attribution is computed after the last job is done: `foreshock report` comes next.
            attribution = wait_for_attribution(reader, run.id, arguments.step)
            if arguments.exact and attribution is not None:
                result = [""]
                for conclusion in attribution.conclusions:
                    result += wrap(conclusion.sentence, "    ", "  → ")
    if is_done and not kind.report and not arguments.no_wait:
        result += ["", f"foreshock report {run.id} --step {arguments.step}   shows the result"]
    _print(probe, arguments, result)
    return 0 if arguments.no_wait or is_done else 1


def _kind(arguments: argparse.Namespace) -> ProbeKind:
    """Return the kind of the requested probe. Raises ConfigurationError if several are requested."""
    asked = [kind for kind in PROBE_KINDS.values() if getattr(arguments, kind.name)]
    if len(asked) > 1:
        names = " and ".join(f"--{kind.name}" for kind in asked)
        raise ConfigurationError(f"{names} are different probes: request one after the other")
    return asked[0] if asked else EXACT


def _step_or_probe(text: str) -> int | str:
    return STEP(text) if text.isdecimal() else text


def _cancel(arguments: argparse.Namespace) -> int:
    if arguments.run != _CANCEL:
        hint = f"; to cancel that probe: foreshock probe {_CANCEL} {arguments.step}"
        raise ConfigurationError(
            f"STEP must be a whole number, got {arguments.step}{hint if arguments.step.startswith(_PROBE_IDS) else ''}"
        )
    with connect(arguments) as reader:
        probe = reader.connection.decoded(reader.connection.request("DELETE", f"/v1/probes/{arguments.step}"))
    _print(probe, arguments)
    return 0


def _print(probe: dict[str, Any], arguments: argparse.Namespace, result: Sequence[str] = ()) -> None:
    lines = [*probe_lines(probe), *result]
    print(json.dumps(probe, indent=2, ensure_ascii=False) if arguments.json else "\n".join(lines))


def _request(arguments: argparse.Namespace) -> dict[str, Any]:
    kind = _kind(arguments)
    options: dict[str, str | None] = {}
    if arguments.trainer_autocast is not None:
        options["autocast"] = None if arguments.trainer_autocast == "none" else arguments.trainer_autocast
    if arguments.trainer_master_dtype is not None:
        options["master_dtype"] = arguments.trainer_master_dtype
    if (options or arguments.scorer) and kind is DOCTOR:
        raise ConfigurationError("--doctor makes replays of its own; --scorer and --trainer-… are for other probes")
    scorers = []
    for word in arguments.scorer or (() if kind.default_scorers else default_scorers()):
        name, variant = split_score_name(word)
        if not name:
            raise ConfigurationError(
                f"--scorer must be NAME or NAME@VARIANT, such as {default_scorers()[0]}, got {word!r}"
            )
        scorers.append({"scorer": name, "variant": variant})
    body = {
        "step": arguments.step,
        "scorers": scorers,
        "exact_pairs": list(EXACT_PAIRS) if arguments.exact else None,
        "kind": kind.name,
        "accelerator": arguments.accelerator,
        "environment": arguments.environment,
        "priority": arguments.priority,
        "max_rollouts": arguments.max_rollouts,
        "options": {_TRAINER_REPLAY: options} if options else None,
    }
    return {name: value for name, value in body.items() if value is not None}


def wait_for_probe(reader: Reader, probe: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Wait for the final state and return the probe; in its present state after the timeout, or if no live worker can
    do it."""
    begun = time.monotonic()
    shown = ""
    while probe["state"] not in _FINAL and (waited := time.monotonic() - begun) < timeout_seconds:
        if waited > _WORKER_SECONDS and _has_no_worker(probe):
            break
        progress = "; ".join(_progress(job) for job in probe.get("jobs") or ())
        if progress != shown:
            spent = f"{waited:.0f} of at most {timeout_seconds:.0f} s"
            print(f"probe {probe['id']}, {spent}: {progress}", file=sys.stderr)
            shown = progress
        time.sleep(0.5)
        try:
            probe = reader.connection.get_json(f"/v1/probes/{probe['id']}")
        except ServiceUnavailable:
            continue
    if probe["state"] == "queued":
        known = "no live worker can do it" if _has_no_worker(probe) else "no worker has taken it yet"
        print(f"the probe stays queued: {known}; start one with `foreshock worker`", file=sys.stderr)
    return probe


def _has_no_worker(probe: Mapping[str, Any]) -> bool:
    """Return True if no live worker offers what any of the unfinished jobs needs."""
    left = [job for job in probe.get("jobs") or () if job["state"] not in _FINAL]
    return bool(left) and all(job["state"] == "queued" and job.get("reason") for job in left)


def _progress(job: Mapping[str, Any]) -> str:
    note = {"queued": job.get("reason"), "running": job.get("doing")}.get(job["state"])
    return f"{job['engine']} {job['state']}{f' ({note})' if note else ''}"


def probe_lines(probe: dict[str, Any]) -> list[str]:
    lines = [f"probe {probe['id']} of step {probe['step']}: {probe['state']}"]
    if probe.get("reason"):
        lines.append(f"  {probe['reason']}")
    rows = [
        [
            str(job["engine"]),
            ", ".join(
                [
                    *(scorer["scorer"] for scorer in job.get("scorers") or ()),
                    *(EXACT_PAIRS[key].name for key in job.get("exact_pairs") or () if key in EXACT_PAIRS),
                ]
            ),
            str(job["state"]),
            *(str(job.get(name) or "") for name in ("worker", "environment", "reason")),
        ]
        for job in probe.get("jobs") or ()
    ]
    header = ["engine", "scorers", "state", "worker", "environment", "reason"]
    lines += table(header, rows, left=(0, 1, 2, 3, 4, 5))
    notes = {str(job["environment_note"]) for job in probe.get("jobs") or () if job.get("environment_note")}
    return lines + [f"  {note}" for note in sorted(notes)]


command = Command(
    "replay a step with a checkpoint through engine and trainer, to find the cause of its mismatch", configure, run
)
