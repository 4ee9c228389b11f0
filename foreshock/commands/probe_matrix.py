"""`foreshock probe matrix RUN --step S`: replay the same rollouts in a grid of configurations, and compare them."""

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from foreshock.client.connection import ServiceConnection
from foreshock.commands.command import connect
from foreshock.commands.option_types import STEP
from foreshock.commands.queries import find_run
from foreshock.commands.text import table, wrap
from foreshock.configuration_grid import (
    VARIATION_EXAMPLE,
    Cell,
    cells_of_grid,
    default_cells,
    parse_variation,
    product_of,
)
from foreshock.diagnosis.configurations import in_words
from foreshock.errors import ConfigurationError, ServiceUnavailable
from foreshock.probe_kinds import MATRIX

_ENDED = frozenset({"done", "failed", "skipped"})
_POLL_SECONDS = 1.0


def add_matrix_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only a matrix has."""
    options = parser.add_argument_group("of a matrix")
    options.add_argument(
        "--step", type=STEP, dest="matrix_step", metavar="S", help="the step whose rollouts are replayed"
    )
    options.add_argument(
        "--vary",
        action="append",
        metavar="SCORER:OPTION=V,V",
        help=f"values of a scorer's option, such as {VARIATION_EXAMPLE}; may be repeated: every "
        f"combination is a cell (default: one change at a time; {MATRIX.rollouts} rollouts)",
    )
    options.add_argument(
        "--on",
        action="append",
        metavar="ACCELERATOR[@ENVIRONMENT]",
        help="replay every cell on this hardware, such as H100 or cpu@avx2; may be repeated (default: any)",
    )


def run_matrix(arguments: argparse.Namespace) -> int:
    """Request the cells, wait, print the matrix. Exit status 1 if no cell has a result."""
    if arguments.matrix_step is None:
        raise ConfigurationError("foreshock probe matrix RUN needs --step S")
    cells = _cells(arguments)
    with connect(arguments) as connection:
        run = find_run(connection, str(arguments.step), arguments.project)
        probes = [
            connection.decoded(
                connection.request("POST", f"/v1/runs/{run.id}/probes", json_body=_request(arguments, cell, hardware))
            )
            for hardware, cell in itertools.product(arguments.on or [None], cells)
        ]
        if not arguments.no_wait:
            _wait(connection, probes, arguments.timeout)
        matrix = connection.get_json(f"/v1/runs/{run.id}/steps/{arguments.matrix_step}/matrix")
    print(json.dumps(matrix, indent=2, ensure_ascii=False) if arguments.json else "\n".join(matrix_lines(matrix)))
    return 0 if arguments.no_wait or any(cell["state"] == "done" for cell in matrix["cells"]) else 1


def _cells(arguments: argparse.Namespace) -> list[Cell]:
    if arguments.vary is None:
        return default_cells(arguments.scorer or ())
    varied = product_of(parse_variation(text) for text in arguments.vary)
    return cells_of_grid([*((name, {}) for name in arguments.scorer or ()), *varied])


def _request(arguments: argparse.Namespace, cell: Cell, hardware: str | None) -> dict[str, Any]:
    accelerator, _, environment = (hardware or "").partition("@")
    body = {
        "step": arguments.matrix_step,
        "kind": MATRIX.name,
        "scorers": [{"scorer": cell.scorer}],
        "options": {cell.scorer: dict(cell.options)} if cell.options else None,
        "accelerator": accelerator or arguments.accelerator,
        "environment": environment or arguments.environment,
        "max_rollouts": arguments.max_rollouts,
    }
    return {name: value for name, value in body.items() if value is not None}


def _wait(connection: ServiceConnection, probes: Sequence[Mapping[str, Any]], timeout_seconds: float) -> None:
    """Wait until every probe has ended, or waits for hardware that no live worker has while others have ended."""
    deadline, shown = time.monotonic() + timeout_seconds, -1
    states = {str(probe["id"]): probe for probe in probes}
    while time.monotonic() < deadline:
        ended = [name for name, probe in states.items() if probe["state"] in _ENDED]
        if len(ended) != shown:
            print(f"{len(ended)} of {len(states)} cells have ended", file=sys.stderr)
            shown = len(ended)
        if all(probe["state"] in _ENDED or (ended and _has_no_worker(probe)) for probe in states.values()):
            return
        time.sleep(_POLL_SECONDS)
        for name in [name for name in states if name not in ended]:
            with contextlib.suppress(ServiceUnavailable):
                states[name] = connection.get_json(f"/v1/probes/{name}")


def _has_no_worker(probe: Mapping[str, Any]) -> bool:
    return probe["state"] == "queued" and bool(probe["reason"])


def matrix_lines(matrix: Mapping[str, Any]) -> list[str]:
    """Return the matrix as lines: a row for each cell, why a cell has no result, the recommendations."""
    rows = []
    for cell in matrix["cells"]:
        found = cell["against_reference"] or {}
        reference = cell["probe"] == matrix["reference"]
        rows.append(
            [
                cell["hardware"],
                cell["scorer"],
                in_words(cell["changed"]) or "as it is",
                "reference" if reference else _number(found.get("k3_kl")),
                _between(found),
                _number(cell["seconds_per_token"], 1e6),
                "" if cell["state"] == "done" else f"{cell['state']}: {cell['reason'] or 'waits'}",
            ]
        )
    title = f"step {matrix['step']}: {matrix['rollouts']} rollouts, {matrix['tokens']} tokens"
    header = ["hardware", "scorer", "configuration", "k3 to reference", "interval", "µs/token", "no result"]
    lines = [title, *table(header, rows, left=(0, 1, 2, 6))]
    if matrix["other_cells"]:
        lines.append(f"{matrix['other_cells']} older cells are over other rollouts or weights and are left out")
    for sentence in matrix["recommendations"]:
        lines += wrap(sentence, "    ", "  → ")
    return lines


def _number(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.3g}"


def _between(found: Mapping[str, Any]) -> str:
    low, high = found.get("low"), found.get("high")
    return "" if low is None or high is None else f"{low:.2g} to {high:.2g}"
