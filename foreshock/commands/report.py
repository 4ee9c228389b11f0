"""`foreshock report`: the diagnosis of a run on one screen, or with its tables, as text, JSON or one HTML page."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from foreshock.client.connection import run_url
from foreshock.commands import report_data, report_page, report_text
from foreshock.commands.command import add_run_argument, add_service_options, check_output, connect, write_output
from foreshock.commands.option_types import STEP
from foreshock.commands.queries import RunQueries, find_run
from foreshock.commands.text import Paint
from foreshock.errors import ConfigurationError
from foreshock.json_values import json_value
from foreshock.model_kind import MODEL_KINDS


class ReportCommand:
    """Prints the diagnosis; with `--full` also the mismatch by step, its links, buckets, lengths, alerts, advice."""

    help = "diagnose a run on one screen; --full: mismatch, its cause, probability buckets, lengths, alerts, advice"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_run_argument(parser, required=False)
        parser.add_argument("--full", action="store_true", help="print all tables")
        parser.add_argument("--step", type=STEP, metavar="N", help="all tables, attribution and buckets of this step")
        parser.add_argument(
            "--model-kind",
            choices=MODEL_KINDS,
            help="show the healthy ranges of this kind (default: the run's); the diagnosis keeps those of the run",
        )
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE",
            help="write to this file: a page to send (.html), JSON (.json) or text (.txt)",
        )  # fmt: skip
        add_service_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report, or write it to a file. Raises ConfigurationError for a file of another kind."""
        form = None
        if arguments.output is not None:
            form = _form(arguments.output, as_json=arguments.json)
            check_output("--output", arguments.output)
        with connect(arguments) as reader:
            run = find_run(reader, arguments.run)
            queries = RunQueries(reader, run.id)
            url = run_url(reader.connection.url, run.project, run.key)
            found = report_data.collect(queries, run, url, step=arguments.step, model_kind=arguments.model_kind)
        if form is None:
            whole = arguments.full or arguments.step is not None
            lines = report_text.render if whole else report_text.render_screen
            print(_json(found) if arguments.json else "\n".join(lines(found, Paint())))
        else:
            write_output("--output", arguments.output, _WRITERS[form](found))
            print(f"{arguments.output}: the report of {run.title}", file=sys.stderr)
        return 0


def _json(found: report_data.ReportData) -> str:
    return json.dumps(json_value(found), indent=2, ensure_ascii=False, allow_nan=False)


_WRITERS: dict[str, Callable[[report_data.ReportData], str]] = {
    ".txt": lambda found: "\n".join(report_text.render(found, Paint.off())),
    ".json": _json,
    ".html": report_page.render_page,
}


def _form(output: Path, *, as_json: bool) -> str:
    form = output.suffix.lower()
    if form not in _WRITERS or (as_json and form != ".json"):
        known = ".json beside --json" if as_json else ", ".join(_WRITERS)
        raise ConfigurationError(f"--output must be a name that ends with {known}, got {output}")
    return form


command = ReportCommand()
