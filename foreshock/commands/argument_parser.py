"""An argument parser whose errors suggest the command, option or choice that was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import NoReturn

from foreshock.suggestions import did_you_mean

__all__ = ["SuggestingParser"]

_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: .*?(?P<given>--[^\s=]+)")


class SuggestingParser(argparse.ArgumentParser):
    """As the base class, with suggestions."""

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
