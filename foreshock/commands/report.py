"""`foreshock report`: the diagnosis of a run on one screen, or with its tables, as text or JSON, or its page."""

import argparse
import json
import sys
from pathlib import Path

from foreshock.client.connection import run_url
from foreshock.commands import report_data, report_text
from foreshock.commands.command import (
    add_fail_on,
    add_run_argument,
    add_service_options,
    check_output,
    connect,
    exit_status,
    write_output,
)
from foreshock.commands.option_types import STEP
from foreshock.commands.queries import RunQueries, find_run
from foreshock.commands.text import Paint
from foreshock.errors import ConfigurationError
from foreshock.json_values import json_value


class ReportCommand:
    """Prints the diagnosis; with `--full` also the mismatch by step, its links, buckets, lengths, alerts, advice."""

    help = "diagnose a run on one screen; --full: mismatch, its cause, probability buckets, lengths, alerts, advice"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_run_argument(parser, required=False)
        parser.add_argument("--full", action="store_true", help="print all tables")
        parser.add_argument("--step", type=STEP, metavar="N", help="all tables, attribution and buckets of this step")
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        parser.add_argument(
            "--html", type=Path, metavar="FILE", help="write the run's page with its plots into one file, to send"
        )
        add_fail_on(parser)
        add_service_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report, or write the run's page. Raises ConfigurationError for a file that cannot be written.

        The status of a printed report says if the verdict is as grave as `--fail-on`.
        """
        if arguments.html is not None:
            return _write_page(arguments)
        with connect(arguments) as reader:
            run = find_run(reader, arguments.run)
            queries = RunQueries(reader, run.id)
            url = run_url(reader.connection.url, run.project, run.key)
            found = report_data.collect(queries, run, url, step=arguments.step)
        if arguments.json:
            print(json.dumps(json_value(found), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            whole = arguments.full or arguments.step is not None
            lines = report_text.render if whole else report_text.render_screen
            print("\n".join(lines(found, Paint())))
        return exit_status(arguments, [found.diagnosis.verdict])


def _write_page(arguments: argparse.Namespace) -> int:
    """Write the run's page, which the service renders as one file."""
    if arguments.json or arguments.full or arguments.step is not None:
        raise ConfigurationError("--html writes the page of the run; --json, --full and --step are of the text")
    check_output("--html", arguments.html)
    with connect(arguments) as reader:
        run = find_run(reader, arguments.run)
        page = reader.connection.request("GET", f"/pages/runs/{run.id}/file")
    write_output("--html", arguments.html, page.text)
    print(f"{arguments.html}: the page of {run.title}", file=sys.stderr)
    return 0


command = ReportCommand()
