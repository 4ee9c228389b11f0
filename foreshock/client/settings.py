"""Settings of the client: arguments first, then `FORESHOCK_*` environment variables, then defaults."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from foreshock.client.connection import configured
from foreshock.client.private_files import private_temporary_folder
from foreshock.errors import ConfigurationError

ClientMode = Literal["tokens", "statistics"]
"""What is sent of the rollouts: every token, or statistics over every token with some rollouts in full."""

_MEBIBYTE = 1 << 20
_GIBIBYTE = 1 << 30
# Settings that a job's environment may set, such as FORESHOCK_MODE, with the least value of each number.
FROM_ENVIRONMENT = {"mode": 0, "full_rollouts": 1, "worst_rollouts": 0, "max_step_bytes": 1}


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of one client. Sizes are in bytes, durations in seconds."""

    url: str
    api_key: str | None
    spool_directory: Path
    max_queue_items: int = 10_000
    max_queue_bytes: int = 2 * _GIBIBYTE
    """Bound on the trainer's arrays that are copied and not yet encoded."""
    max_memory_bytes: int = 256 * _MEBIBYTE
    """Bound on undelivered items in memory, which are those that the disk does not take; others are dropped."""
    max_spool_bytes: int = 16 * _GIBIBYTE
    """Bound on the undelivered items on disk that this client wrote or adopted; further ones are dropped and counted.
    Each rank has a client: eight on one disk may need eight times as much."""
    max_rejected_bytes: int = _GIBIBYTE
    """Bound on items kept on disk because the service rejected them."""
    timeout_seconds: float = 60.0
    """Timeout of a request."""
    exit_seconds: float = 10.0
    """Longest delay of the end of the process, for all its clients, to deliver the rest and write it to disk."""
    heartbeat_seconds: float = 30.0
    """Time between the messages that tell the service that this trainer lives."""
    mode: ClientMode = "tokens"
    full_rollouts: int = 64
    """Rollouts of a step that travel in full with `mode="statistics"`, a sample that keeps the distribution of lengths;
    fewer if `max_step_bytes` would be exceeded."""
    worst_rollouts: int = 4
    """Rollouts of a step that travel in full besides: those with the largest |d| of a token."""
    max_step_bytes: int = 950_000
    """Bound on the bytes of a step with `mode="statistics"`. Each shard has its part; the statistics always travel."""

    @classmethod
    def resolve(
        cls,
        url: str | None = None,
        api_key: str | None = None,
        spool_directory: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> ClientSettings:
        """Return the settings from the arguments, the environment and the defaults, in this order.

        Raises ConfigurationError for a setting that does not exist or is invalid.
        """
        known = [name for name in cls.__slots__ if name not in ("url", "api_key", "spool_directory")]
        for name in settings:
            if name not in known:
                raise ConfigurationError(f"unknown setting {name!r} of Client; settings: {', '.join(known)}")
        for name in FROM_ENVIRONMENT:
            if name not in settings and (value := os.environ.get(f"FORESHOCK_{name.upper()}")):
                settings[name] = value
        _check(settings)
        address, key = configured(url, api_key)
        directory = spool_directory or os.environ.get("FORESHOCK_SPOOL_DIRECTORY") or _default_spool_directory(address)
        try:
            folder = Path(directory).expanduser().absolute()
        except RuntimeError:
            raise ConfigurationError(
                f"the spool directory {str(directory)!r} names a home folder that does not exist: give an absolute path"
            ) from None
        return cls(
            url=address,
            api_key=key,
            spool_directory=folder,
            **settings,
        )


def _check(settings: dict[str, Any]) -> None:
    """Check the settings of what is sent; texts from the environment become numbers."""
    if settings.get("mode", "tokens") not in get_args(ClientMode):
        raise ConfigurationError(f"mode must be one of {', '.join(get_args(ClientMode))}, got {settings['mode']!r}")
    for name, least in FROM_ENVIRONMENT.items():
        if name == "mode" or name not in settings:
            continue
        try:
            number = int(settings[name])
        except (TypeError, ValueError):
            number = least - 1
        if number < least:
            raise ConfigurationError(f"{name} must be a whole number >= {least}, got {settings[name]!r}")
        settings[name] = number


def _default_spool_directory(url: str) -> Path:
    """Return a folder per user and service; below the home folder, if writable, so that it survives a reboot."""
    service = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return (_usable_cache() or private_temporary_folder("foreshock-")) / "foreshock" / "spool" / service


def _usable_cache() -> Path | None:
    """Return the user's cache folder; None if it cannot be written."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(cache) if cache else Path.home() / ".cache"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        # RuntimeError: a container's user that has no line in /etc/passwd, without HOME.
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None
