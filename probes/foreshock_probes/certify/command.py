"""`foreshock certify`: is this engine the same policy as this trainer, before a run starts."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from foreshock.api.records import to_json
from foreshock.certify.certificate import Certificate, read_certificate
from foreshock.certify.compare import Moved, check_weights, compare, comparison_lines
from foreshock.certify.text import certificate_html, certificate_lines, junit_xml
from foreshock.commands.command import add_service_options, check_output, connect, write_output
from foreshock.commands.option_types import COUNT, whole
from foreshock.commands.text import Paint
from foreshock.digests import weights_digest
from foreshock.errors import ConfigurationError, ForeshockError
from foreshock.scorers import ENGINE_DECODE, ENGINE_REPLAY, ROUNDED, SCORERS
from foreshock_probes.certify.bisect import Bisection, bisect
from foreshock_probes.certify.certification import Asked, Certification, given_rollouts
from foreshock_probes.doctor.command import check_scorer, seconds
from foreshock_probes.doctor.engines import scorer_and_options
from foreshock_probes.offers import what_lacks

_DEFAULT_ENGINES = (ENGINE_DECODE, ENGINE_REPLAY)
_BUDGET = 600.0
_SHOW, _BISECT = "show", "bisect"
_OF_SAMPLING = ("rollouts", "tokens", "longest", "seed", "prompts")
_OF_BISECT = ("package", "first", "last", "setup", "work")


class CertifyCommand:
    """Certify a model, or show a certificate; with `--against`, compare with another certificate."""

    help = "certify that an engine computes the same policy as a trainer's forward pass, condition by condition"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to `parser`."""
        parser.add_argument(
            "what", nargs="+", metavar="MODEL | show FILE | bisect MODEL",
            help="a folder of safetensors; `show` and a certificate; or `bisect` and a folder",
        )  # fmt: skip
        parser.add_argument(
            "--engine",
            nargs="+",
            default=list(_DEFAULT_ENGINES),
            metavar="SCORER[:OPTION=VALUE,…]",
            help=f"scorers of the engine, with its options (default: {' '.join(_DEFAULT_ENGINES)})",
        )
        parser.add_argument(
            "--trainer",
            default=ROUNDED,
            metavar="SCORER[:OPTION=VALUE,…]",
            help="the scorer that computes as the trainer does (default: %(default)s)",
        )
        parser.add_argument(
            "--out", type=Path, metavar="FILE", help="write the certificate (default: certificate.json)"
        )
        parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line: text, or JSON token ids")
        parser.add_argument("--rollouts", type=whole(8, 4096), default=32, metavar="N", help="prompts (default: 32)")
        parser.add_argument("--tokens", type=COUNT, default=64, metavar="N", help="tokens a response (default: 64)")
        parser.add_argument(
            "--longest", type=whole(64), default=1024, metavar="N", help="longest context to try (default: 1024)"
        )
        parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of sampling (default: 0)")
        parser.add_argument(
            "--budget", type=seconds, default=_BUDGET, help="time: 90s, 10m, 1h (default: 10m); the rest is not tried"
        )
        parser.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="only these conditions")
        parser.add_argument(
            "--explain", choices=("all", "cause", "none"), default="all",
            help="what is examined if a row is different: the doctor's cause and the first layer (default), the cause "
            "only, or nothing",
        )  # fmt: skip
        parser.add_argument(
            "--against", type=Path, metavar="FILE",
            help="another certificate of the model: its tokens are scored, and the status is 1 if a row became worse",
        )  # fmt: skip
        parser.add_argument("--html", type=Path, metavar="FILE", help="write the certificate as one HTML file")
        parser.add_argument("--junit", type=Path, metavar="FILE", help="write the rows as JUnit XML")
        add_service_options(parser)
        parser.add_argument("--project", metavar="NAME", help="project of the certificate, if a service keeps it")
        of_bisect = parser.add_argument_group("bisect: the first release of a package that changed a row")
        of_bisect.add_argument("--package", metavar="NAME", help="such as vllm, sglang, transformers, torch")
        of_bisect.add_argument("--from", dest="first", metavar="RELEASE", help="the release to compare with")
        of_bisect.add_argument("--to", dest="last", metavar="RELEASE", help="the newest release to try")
        of_bisect.add_argument(
            "--setup", metavar="COMMAND",
            help="makes the environment of $RELEASE in $FOLDER, with Foreshock in it (default: venv and pip)",
        )  # fmt: skip
        of_bisect.add_argument(
            "--work", type=Path, metavar="FOLDER",
            help="environments and certificates, which a second call takes up (default: certify-bisect)",
        )  # fmt: skip

    def run(self, arguments: argparse.Namespace) -> int:
        """Certify or show; return 1 if no row was tried, or one is different (`--against`: worse); 130: Ctrl-C."""
        for option in ("html", "junit", "out"):
            if getattr(arguments, option) is not None:
                check_output(f"--{option}", getattr(arguments, option))
        other = None if arguments.against is None else read_certificate(arguments.against)
        if arguments.what[0] == _BISECT and len(arguments.what) == 2:
            return _bisect(arguments)
        if any(getattr(arguments, option) is not None for option in _OF_BISECT):
            raise ConfigurationError("--package, --from, --to, --setup and --work belong to `bisect MODEL`")
        if arguments.what in ([_SHOW], [_BISECT]) and not Path(arguments.what[0]).is_dir():
            needed = {_SHOW: "FILE, a certificate", _BISECT: "MODEL, a folder of safetensors"}
            raise ConfigurationError(f"certify {arguments.what[0]} needs {needed[arguments.what[0]]}")
        if arguments.what[0] == _SHOW and len(arguments.what) == 2:
            found = read_certificate(Path(arguments.what[1]))
        elif len(arguments.what) == 1:
            found = _certified(arguments, other)
        else:
            raise ConfigurationError("give one MODEL, `show` and one certificate, or `bisect` and one MODEL")
        return _report(arguments, found, other)


def _report(arguments: argparse.Namespace, found: Certificate, other: Certificate | None) -> int:
    moved: list[Moved] = [] if other is None else compare(found, other)
    worse = [each.row for each in moved if each.change == "worse"]
    print("\n".join(certificate_lines(found, Paint())))
    if other is not None:
        print("\n".join(["", *comparison_lines(found, other, moved)]))
    if arguments.html is not None:
        write_output("--html", arguments.html, certificate_html(found))
    if arguments.junit is not None:
        write_output("--junit", arguments.junit, junit_xml(found, worse))
    if arguments.what[0] != _SHOW and (arguments.url or os.environ.get("FORESHOCK_URL")):
        _send(arguments, found)
    if found.ended == "interrupted" and arguments.what[0] != _SHOW:
        return 130
    verdicts = {row.verdict for row in found.rows}
    return int(verdicts <= {"not tried"} or (bool(worse) if other is not None else "different" in verdicts))


def _send(arguments: argparse.Namespace, found: Certificate) -> None:
    """Send a certificate to the service; only if it was asked for by `--url`, an error fails the command."""
    try:
        with connect(arguments) as reader:
            query = {"project": arguments.project} if arguments.project else None
            reader.connection.request("POST", "/v1/certificates", query=query, json_body=to_json(found))
    except ForeshockError as error:
        if arguments.url:
            raise
        print(f"the certificate was not sent: {error}", file=sys.stderr)


def _certified(arguments: argparse.Namespace, other: Certificate | None) -> Certificate:
    out = arguments.out or Path("certificate.json")
    check_output("--out", out)
    model = Path(arguments.what[0])
    if not model.is_dir():
        raise ConfigurationError(f"there is no folder {model}; give a folder with config.json and safetensors")
    if other is not None:
        check_weights(model.name, weights_digest(model), other)
    engines = dict(_asked("--engine", each) for each in arguments.engine)
    trainer, options = _asked("--trainer", arguments.trainer)
    if SCORERS[trainer].engine != "torch":
        raise ConfigurationError(f"--trainer: {trainer} is a scorer of an engine; choose one of torch")
    asked = Asked(
        model=model,
        engines=engines,
        trainer=trainer,
        trainer_options=options,
        rows=tuple(arguments.rows),
        budget=arguments.budget,
        explain=arguments.explain,
        **{name: getattr(arguments, name) for name in _OF_SAMPLING},
    )
    start = time.monotonic()

    def log(line: str) -> None:
        spent = time.monotonic() - start
        print(f"{spent:5.0f} of at most {arguments.budget:.0f} s  {line}", file=sys.stderr, flush=True)

    given = None if other is None else given_rollouts(other)
    try:
        with tempfile.TemporaryDirectory() as files:
            return Certification(asked, Path(files), out, log, given).run()
    except OSError as error:
        where = os.environ.get("TMPDIR", "the folder of temporary files")
        raise ConfigurationError(
            f"{where} cannot be used for the engines' files ({error.strerror}); set TMPDIR to another folder"
        ) from None


def _bisect(arguments: argparse.Namespace) -> int:
    """Print which release changed a row; return 1 if one did."""
    if None in (arguments.package, arguments.first, arguments.last):
        raise ConfigurationError("bisect needs --package, --from and --to")
    for option in ("against", "html", "junit", "out"):
        if getattr(arguments, option) is not None:
            raise ConfigurationError(f"--{option} is not for bisect: its certificates are in the folder of --work")
    words = [arguments.what[1], "--explain", "none", "--trainer", arguments.trainer, "--engine", *arguments.engine]
    for option in _OF_SAMPLING:
        if getattr(arguments, option) is not None:
            words += [f"--{option}", str(getattr(arguments, option))]
    words += ["--budget", f"{arguments.budget:.0f}s", *(["--rows", *arguments.rows] if arguments.rows else [])]
    work = arguments.work or Path("certify-bisect")
    asked = Bisection(arguments.package, arguments.first, arguments.last, work, words, arguments.setup)
    lines, is_changed = bisect(asked, partial(print, file=sys.stderr, flush=True))
    print("\n".join(lines))
    return int(is_changed)


def _asked(option: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the scorer and the options of an argument. Raises ConfigurationError if it cannot be used here."""
    check_scorer(option, text)
    scorer, options = scorer_and_options(text)
    lacks = what_lacks(scorer)
    if lacks is not None:
        raise ConfigurationError(f"{option}: {scorer} cannot be used: {lacks}")
    return scorer, options


certify = CertifyCommand()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m foreshock_probes.certify.command")
    certify.configure(parser)
    sys.exit(certify.run(parser.parse_args()))
