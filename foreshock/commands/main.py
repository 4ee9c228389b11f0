"""`foreshock <command>`: finds commands by entry points, so that the library imports neither service nor probes.

Exit status: 0 success, 1 a ForeshockError (one line, no traceback), 2 invalid arguments or a missing extra, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence

import foreshock
from foreshock.commands.command import Command, SuggestingParser
from foreshock.errors import ForeshockError, Rejected, Unauthorized
from foreshock.installing import install_command

ENTRY_POINT_GROUP = "foreshock.commands"
_OWN_PACKAGES = ("foreshock", "foreshock_service", "foreshock_probes")
_DESCRIPTION = "The seismograph of LLM reinforcement learning: training-inference mismatch, its causes, early warning."


class MissingExtra(Exception):
    """A command whose dependencies are not installed; `extra` installs them."""

    def __init__(self, command: str, extra: str, module: str) -> None:
        super().__init__(f"`{command}` needs the extra `{extra}` ({module} is not installed): {install_command(extra)}")
        self.extra = extra


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named in `argv` (default: the arguments of the process) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A locale without π and × shows "?" for them.
            stream.reconfigure(errors="replace")
    try:
        status = _run(words)
        # Here, where an error is told; not at the end of the interpreter.
        sys.stdout.flush()
        return status
    except MissingExtra as missing:
        print(f"foreshock: {missing}", file=sys.stderr)
        return 2
    except ForeshockError as error:
        print(f"foreshock: error: {_message(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe.
        _drop_output()
        return 0
    except OSError as error:
        # Of this machine: a full disk, a folder that may not be read.
        print(f"foreshock: error: {error}", file=sys.stderr)
        _drop_output()
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _drop_output() -> None:
    """Keep Python from failing again when it closes stdout."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: ForeshockError) -> str:
    """Return the error's text; for a refusal by the service only the reason, without the HTTP call that a command
    made."""
    reason = error.problem.get("detail") if isinstance(error, (Rejected, Unauthorized)) else None
    if not isinstance(reason, str):
        return str(error)
    return f"{reason}; check FORESHOCK_API_KEY or --api-key" if isinstance(error, Unauthorized) else reason


def _run(words: list[str]) -> int:
    entry_points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    requested = next((word for word in words if not word.startswith("-")), None)
    parser = SuggestingParser(prog="foreshock", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"foreshock {foreshock.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="<command>", required=True)
    if words == ["--version"]:
        parser.parse_args(words)
    # Import only the requested command; import all of them for the list of commands.
    if requested in entry_points:
        chosen = _load(entry_points[requested])
        chosen.configure(_parser_of(commands, requested, chosen))
        arguments = parser.parse_args(words)
        try:
            return chosen.run(arguments)
        except ModuleNotFoundError as error:
            raise _as_missing_extra(entry_points[requested], error) from error
    for name in sorted(entry_points):
        try:
            command = _load(entry_points[name])
        except MissingExtra as missing:
            how = install_command(missing.extra).replace("%", "%%")  # argparse fills in what follows a %
            commands.add_parser(name, help=f"(needs: {how})")
        else:
            _parser_of(commands, name, command)
    parser.parse_args(words)
    return 2


def _parser_of(
    commands: argparse._SubParsersAction[SuggestingParser], name: str, command: Command
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=command.help, description=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _load(point: importlib.metadata.EntryPoint) -> Command:
    try:
        command: Command = point.load()
    except ModuleNotFoundError as error:
        raise _as_missing_extra(point, error) from error
    return command


def _as_missing_extra(point: importlib.metadata.EntryPoint, error: ModuleNotFoundError) -> Exception:
    """Return MissingExtra for a third-party module; the error itself for a module of ours, which is a bug."""
    module = (error.name or "").partition(".")[0]
    package = point.module.partition(".")[0]
    if not module or module in _OWN_PACKAGES or package == "foreshock":
        return error
    extras = {"foreshock_service": "service", "foreshock_probes": "vllm" if module == "vllm" else "probes"}
    return MissingExtra(point.name, extras.get(package, package), module)


if __name__ == "__main__":
    sys.exit(main())
