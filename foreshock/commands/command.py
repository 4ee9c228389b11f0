"""The parts that commands share: the parser, the options of the service, the connection."""

from __future__ import annotations

import argparse
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from foreshock.client.connection import DEFAULT_URL
from foreshock.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    from foreshock.client.reader import Reader
    from foreshock.healthy_ranges import Verdict
    from foreshock.severity import Severity

_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: .*?(?P<given>--[^\s=]+)")


class SuggestingParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors suggest the nearest choice or option."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message with a suggestion; exit with status 2."""
        suggestion = ""
        if choice := _INVALID_CHOICE.search(message):
            suggestion = did_you_mean(choice["given"], re.findall(r"'([^']*)'", choice["known"]))
        elif option := _UNRECOGNIZED.search(message):
            suggestion = did_you_mean(option["given"], _options(self))
        super().error(message + suggestion)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the long options of a parser and of its commands."""
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `foreshock`, behind an entry point of the group `foreshock.commands`.

    `help` is one line for `foreshock --help`. `run` returns the exit status; a ForeshockError is printed as one line,
    with exit status 1. Import large packages inside it: the module of every command is imported for `--help`.
    """

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Add `--url` and `--api-key`, with the same defaults for every command."""
    group = parser.add_argument_group("service")
    group.add_argument("--url", help=f"the service's address (default: FORESHOCK_URL, else {DEFAULT_URL})")
    group.add_argument(
        "--api-key", metavar="KEY", help="an API key (default: FORESHOCK_API_KEY, which other users cannot see)"
    )


def connect(arguments: argparse.Namespace) -> Reader:
    """Open the reader of `add_service_options` and `--project`. Raises ConfigurationError for an invalid address."""
    # numpy and pyarrow, which it imports, take most of the time of `foreshock --version`.
    from foreshock.client.reader import Reader

    project = getattr(arguments, "project", None)
    return Reader(arguments.url, project, api_key=arguments.api_key, retry_seconds=0.0)


def add_fail_on(parser: argparse.ArgumentParser) -> None:
    """Add `--fail-on`, for `exit_status`."""
    parser.add_argument(
        "--fail-on", choices=("critical", "warning", "never"), default="critical",
        help="exit with status 1 if something is critical (default), or a warning too",
    )  # fmt: skip


def exit_status(arguments: argparse.Namespace, found: Iterable[Verdict | Severity]) -> int:
    """Return 1 if something found is as grave as `--fail-on` says, else 0."""
    grave = {"critical": ("critical",), "warning": ("critical", "warning"), "never": ()}[arguments.fail_on]
    return int(any(each in grave for each in found))


def add_run_argument(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add `run` and `--project`, for `foreshock.commands.queries.find_run`."""
    default = "" if required else " (default: the newest run)"
    parser.add_argument("run", nargs=None if required else "?", help=f"a run's id, key or name{default}")
    add_project_option(parser)


def add_project_option(parser: argparse.ArgumentParser) -> None:
    """Add `--project`, for `foreshock.commands.queries.find_run`."""
    parser.add_argument("--project", help="the run's project, if several projects use its key")


def check_output(option: str, output: Path) -> None:
    """Raise ConfigurationError if a file cannot be written, before the work whose result it will hold."""
    code = None
    if output.is_dir():
        code = errno.EISDIR
    elif not output.parent.is_dir():
        code = errno.ENOENT
    elif not os.access(output.parent, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code is not None:
        raise ConfigurationError(f"{option} {output} cannot be written ({os.strerror(code)})")


def write_output(option: str, output: Path, text: str) -> None:
    """Write the file in one piece. A failure raises ConfigurationError and leaves the old file."""
    temporary = output.with_name(f".{output.name}.part")
    try:
        temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        temporary.replace(output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigurationError(f"{option} {output} cannot be written ({error.strerror})") from None
