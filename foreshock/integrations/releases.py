"""The minor releases of frameworks that integrations and importers follow.

`scripts/releases.py` has the functions and fields of each that they rely on, checked against the releases' sources.
"""

import contextlib
import importlib.metadata
import re
from typing import Final

from foreshock.client.reporting import LogOnce

__all__ = ["KNOWN_VERSIONS", "installed", "is_known", "warn_of_unknown_version"]

KNOWN_VERSIONS: Final = {
    "trl": "1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 1.10, 1.11, 1.12, 1.13, 1.14, 1.15, 1.16",
    "verl": "0.6, 0.7, 0.8, 0.9",
    "slime": "0.2, 0.3",
    "vime": "0.2",
    "miles": "0.0, 0.1",
    "skyrl": "0.2, 0.3, 0.4",
    "prime-rl": "0.8",
    "nemo-rl": "0.6",
    "tinker-cookbook": "0.6",
    "areal": "1.0",
    "openrlhf": "0.11",
    "roll": "0.3",
    "agentlightning": "1.0",
    "ms-swift": "4.6",
    "unsloth": "2026.10",
    "open-instruct": "0.2",
    "rllm": "0.3",
}


def is_known(framework: str, version: str) -> bool:
    """Return whether the integration follows a version's minor release."""
    return ".".join(re.findall(r"\d+", version)[:2]) in KNOWN_VERSIONS[framework].split(", ")


def warn_of_unknown_version(framework: str, log: LogOnce) -> None:
    """Log one line if the installed release is none of those that the integration follows."""
    version = installed(framework)
    if version and not is_known(framework, version):
        log.warning(
            "version",
            f"{framework} {version} is not known, so what is logged may be incomplete. "
            f"Known versions: {KNOWN_VERSIONS[framework]}.",
        )


def installed(framework: str) -> str:
    """Return the installed release, empty if the framework is run from a folder."""
    for name in (framework, "miles-rl" if framework == "miles" else framework):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""
