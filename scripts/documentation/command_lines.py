"""The page of the command line: the output of `foreshock COMMAND --help` for every command."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Iterator
from functools import partial
from typing import Final

from foreshock.commands.command import SuggestingParser
from foreshock.commands.main import ENTRY_POINT_GROUP

_HEAD: Final = """# The command line

Every command explains itself with `--help`; this page is that text. Commands that talk to a service take its address
from `FORESHOCK_URL` and the key from `FORESHOCK_API_KEY`. The exit status is 0 for success, 1 for an error, 2 for
invalid arguments or a missing extra, 130 for Ctrl-C.
"""
_WIDTH = 100


def page() -> str:
    """Return the text of the page."""
    points = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    parts = [_HEAD]
    for point in points:
        command = point.load()
        parser = SuggestingParser(
            prog=f"foreshock {point.name}", description=command.help, formatter_class=_formatter()
        )
        command.configure(parser)
        texts = [each.format_help().rstrip() for each in _parsers(parser)]
        parts.append(f"## foreshock {point.name}\n\n" + "\n\n".join(f"```text\n{text}\n```" for text in texts) + "\n")
    return "\n".join(parts)


def _formatter() -> partial[argparse.RawDescriptionHelpFormatter]:
    return partial(argparse.RawDescriptionHelpFormatter, width=_WIDTH)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser, then those of its actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                each.formatter_class = _formatter()
                yield from _parsers(each)
