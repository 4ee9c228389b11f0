"""`foreshock report`: the diagnosis of a run, as text or JSON."""

from __future__ import annotations

import argparse
import json

from foreshock.commands import diagnosis, report_text
from foreshock.commands.command import add_run_argument, add_service_options, connect, run_url
from foreshock.commands.queries import RunQueries, find_run
from foreshock.commands.text import Paint
from foreshock.model_kind import MODEL_KINDS

__all__ = ["command"]


class ReportCommand:
    """Prints the diagnosis: mismatch by step, its cause, buckets of tokens, lengths, alerts, advice."""

    help = "diagnose a run: mismatch, its cause, probability buckets, lengths, alerts, learning-rate advice"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_run_argument(parser, required=False)
        parser.add_argument("--step", type=int, metavar="N", help="show attribution and buckets of this step")
        parser.add_argument(
            "--model-kind", choices=MODEL_KINDS, help="use the healthy ranges of this kind (default: the run's)"
        )
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        add_service_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report."""
        with connect(arguments) as connection:
            run = find_run(connection, arguments.run, arguments.project)
            queries = RunQueries(connection, run.id)
            found = diagnosis.diagnose(
                queries,
                run,
                run_url(connection, run.project, run.key),
                step=arguments.step,
                model_kind=arguments.model_kind,
            )
        if arguments.json:
            print(json.dumps(diagnosis.to_json(found), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            print("\n".join(report_text.render(found, Paint())))
        return 0


command = ReportCommand()
