"""`foreshock report`: the page of a run as text, on one screen or with its tables, as JSON, or as a file."""

import argparse
import json
import sys
from pathlib import Path

from foreshock.commands.command import (
    Command,
    add_fail_on,
    add_run_argument,
    add_service_options,
    check_output,
    connect,
    exit_status,
    write_output,
)
from foreshock.commands.option_types import STEP
from foreshock.commands.queries import find_run, if_any, sorted_alerts
from foreshock.commands.text import STYLES, Paint
from foreshock.errors import ConfigurationError
from foreshock.json_values import json_value


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, required=False)
    parser.add_argument("--full", action="store_true", help="print the whole page of the run")
    parser.add_argument("--step", type=STEP, metavar="N", help="print the page of this step")
    parser.add_argument("--json", action="store_true", help="print the diagnosis, alerts and advice as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the run's page with its plots into one file, to send"
    )
    add_fail_on(parser)
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, or write the run's page. Raises ConfigurationError for a file that cannot be written.

    The status of a printed report says if the verdict is as grave as `--fail-on`.
    """
    if arguments.html is not None:
        return _write_page(arguments)
    with connect(arguments) as reader:
        run = find_run(reader, arguments.run)
        found = reader.diagnosis(run.id)
        if arguments.json:
            alerts, advice = sorted_alerts(reader, run.id), if_any(lambda: reader.advice(run.id))
            answer = {"run": run, "diagnosis": found, "alerts": alerts, "advice": advice}
            print(json.dumps(json_value(answer), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            asked = {"step": arguments.step, "whole": "true" if arguments.full else None}
            text = reader.connection.request("GET", f"/pages/runs/{run.id}/text", query=asked).text
            paint, style = Paint(), STYLES.get(found.verdict)
            print("\n".join(paint(line, style) if line == found.headline else line for line in text.splitlines()))
    return exit_status(arguments, [found.verdict])


def _write_page(arguments: argparse.Namespace) -> int:
    if arguments.json or arguments.full or arguments.step is not None:
        raise ConfigurationError("--html writes the page of the run; --json, --full and --step are of the text")
    check_output("--html", arguments.html)
    with connect(arguments) as reader:
        run = find_run(reader, arguments.run)
        page = reader.connection.request("GET", f"/pages/runs/{run.id}/file")
    write_output("--html", arguments.html, page.text)
    print(f"{arguments.html}: the page of {run.title}", file=sys.stderr)
    return 0


command = Command(
    "diagnose a run on one screen; --full: mismatch, its cause, probability buckets, lengths, alerts, advice",
    configure,
    run,
)
