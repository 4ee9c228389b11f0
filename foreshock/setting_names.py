"""Names of `FORESHOCK_*` variables that no part reads, which are usually misspelled.

Client, service and worker share one prefix and often one environment, so each knows the names of all three. They come
from the settings objects. Those of service and worker are read from their sources: importing them needs pydantic and
SQLAlchemy, which the environment of a trainer may lack.
"""

import ast
import logging
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from foreshock.client.settings import FROM_ENVIRONMENT
from foreshock.errors import nearest

_PREFIX = "FORESHOCK_"
_SETTINGS = (
    ("foreshock_service", "platform/settings.py", "Settings"),
    ("foreshock_probes", "settings.py", "WorkerSettings"),
)

OTHER_NAMES = frozenset(
    {
        # The client and the integrations.
        "URL", "API_KEY", "SPOOL_DIRECTORY", "RUN_KEY", "ATTEMPT_KEY", "EXPORT", "ADVICE_MODE", "CORRECTION",
        "CORRECTION_MODE", "SYNCHRONOUS", "WEIGHTS_ROOT", "NOTARY",
        # The worker's engines, the example for Slurm, and tests of crashes.
        "INSTRUCTION_SET", "KEY_FILE",
        # docker-compose.yml, which passes them on under other names.
        "BIND", "CHECKPOINTS", "PROXY_BIND", "PUBLIC_HOST", "PUBLIC_PORT", "READER_PASSWORD", "SCRAPE_API_KEY",
        "SERVICE_MEMORY", "WORKER_MEMORY",
        "WORKER_API_KEY",
    }
)  # fmt: skip
"""Names, without the prefix, that are not read by a settings object."""

# Kubernetes sets these in the containers of a namespace that has a Service with the name `foreshock`.
_OF_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP)(_\w+)?")

_logger = logging.getLogger("foreshock")
_told: set[str] = set()


@cache
def setting_names() -> frozenset[str]:
    """Return every known name without the prefix; no name if the sources of service and worker cannot be read."""
    declared = []
    for package, path, name in _SETTINGS:
        found = find_spec(package)  # without importing it
        if found is None or not found.submodule_search_locations:
            return frozenset()
        try:
            declared.append(_fields(Path(found.submodule_search_locations[0]) / path, name))
        except (OSError, SyntaxError):
            return frozenset()
    return OTHER_NAMES.union((name.upper() for name in FROM_ENVIRONMENT), *declared)


def unknown_settings(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the unknown names among `variables` (default: of this process), each with a line that reports it."""
    known = setting_names()
    found = {}
    for variable in os.environ if variables is None else variables:
        # Upper and lower case are the same to the service and the worker.
        name = variable.upper().removeprefix(_PREFIX)
        if not known or not variable.upper().startswith(_PREFIX) or name in known or _OF_KUBERNETES.fullmatch(name):
            continue
        similar = nearest(name, known)
        found[variable] = f"unknown setting {variable}" + (
            f"; did you mean {_PREFIX}{similar}?" if similar else ": it has no effect; check its name, or unset it"
        )
    return found


def log_unknown_settings() -> None:
    """Log a warning for each unknown name of this process's environment that was not reported before."""
    for line in _not_yet_told():
        _logger.warning("%s", line)


def print_unknown_settings() -> None:
    """Print a warning for each unknown name of this process's environment that was not reported before."""
    for line in _not_yet_told():
        print(f"foreshock: warning: {line}", file=sys.stderr)


def _not_yet_told() -> list[str]:
    new = {name: line for name, line in unknown_settings().items() if name not in _told}
    _told.update(new)
    return list(new.values())


def _fields(path: Path, name: str) -> list[str]:
    """Return the annotated fields of a class, in capitals, as its source declares them."""
    (found,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return [
        node.target.id.upper()
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
