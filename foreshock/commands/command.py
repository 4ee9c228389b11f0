"""What a command is, and what the commands that talk to a service share."""

from __future__ import annotations

import argparse
import os
from typing import Protocol

from foreshock.client.connection import DEFAULT_URL, ServiceConnection

__all__ = ["Command", "add_service_options", "connect", "run_url"]


class Command(Protocol):
    """A command of `foreshock`: an object behind an entry point of the group `foreshock.commands`.

    Import heavy things inside `run`: the module of every command is imported for `foreshock --help`.
    """

    help: str
    """One line."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the exit status. A ForeshockError is shown as one line, with exit status 1."""


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """`--url` and `--api-key`, with the same defaults for every command."""
    group = parser.add_argument_group("service")
    group.add_argument("--url", help=f"the service's address (default: FORESHOCK_URL, else {DEFAULT_URL})")
    group.add_argument("--api-key", metavar="KEY", help="an API key (better: FORESHOCK_API_KEY)")


def connect(arguments: argparse.Namespace) -> ServiceConnection:
    """A connection as `add_service_options` says. Raises ConfigurationError for an address that is none."""
    url = arguments.url or os.environ.get("FORESHOCK_URL") or DEFAULT_URL
    return ServiceConnection(url, arguments.api_key or os.environ.get("FORESHOCK_API_KEY") or None)


def run_url(connection: ServiceConnection, run: str) -> str:
    """The address of a run's page."""
    return f"{connection.url}/runs/{run}"
