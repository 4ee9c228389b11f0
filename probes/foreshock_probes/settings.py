"""The settings of a worker: FORESHOCK_* environment variables, printed at start with secrets masked."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from foreshock.client.connection import shown_address, usable_key
from foreshock.errors import ConfigurationError


class WorkerSettings(BaseSettings):
    """The settings of a worker. Times are in seconds.

    `weights_roots` maps the root names of announced checkpoints to folders of this machine, written
    `name=/absolute/folder,other@project=/another,shared@*=/third`: a root without a project is for runs of the project
    `default`, one with `@*` for those of every project. `accelerator` is the accelerator type that this worker offers
    ("cpu", or a name such as "nvidia-h200"); empty: detected.

    `engine_servers` are the running servers of the scorers `vllm.http` and `sglang.http`, written
    `vllm=http://127.0.0.1:8000,sglang=http://127.0.0.1:30000`, `engine_server_keys` their API keys, written `vllm=key`.
    `engine_servers_reload` names, separated by commas, those whose weights the worker may replace by a checkpoint's
    (SGLang only): servers for replays, never the engine of a training run. `trainer_forward` is the function of the
    scorer `torch.own`, as `module:function` (`foreshock_probes.scorers.trainer_forward`). An engine's process that
    shows no progress for `engine_silence_seconds` is killed and its job tried again; loading a model shows none.
    """

    model_config = SettingsConfigDict(env_prefix="FORESHOCK_", extra="ignore", frozen=True, populate_by_name=True)

    url: str = "http://127.0.0.1:8765"
    api_key: SecretStr | None = None
    weights_roots: Annotated[dict[str, Path], NoDecode] = Field(default_factory=dict)
    engine_servers: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    engine_server_keys: Annotated[dict[str, SecretStr], NoDecode] = Field(default_factory=dict)
    engine_servers_reload: Annotated[frozenset[str], NoDecode] = frozenset()
    trainer_forward: str = Field(default="", pattern=r"^([\w.]+:\w+)?$")
    accelerator: str = ""
    worker_name: str = Field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    lease_wait_seconds: float = Field(default=20.0, ge=0, le=60)
    engine_silence_seconds: float = Field(default=1800.0, gt=0)
    shutdown_grace_seconds: float = Field(default=20.0, ge=0)

    @field_validator("weights_roots", "engine_servers", "engine_server_keys", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        return parse_names(value) if isinstance(value, str) else value

    @field_validator("engine_servers_reload", mode="before")
    @classmethod
    def _parse_list(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("weights_roots")
    @classmethod
    def _named_and_absolute_roots(cls, roots: dict[str, Path]) -> dict[str, Path]:
        for name, folder in roots.items():
            root, at, project = name.partition("@")
            if not root or (at and not project):
                raise ValueError(f"weights roots must be named name, name@project or name@*, got {name!r}")
            if not folder.is_absolute():
                raise ValueError(f"the folder of the weights root {name!r} must be absolute, got {str(folder)!r}")
        return roots

    @field_validator("engine_servers")
    @classmethod
    def _plain_addresses(cls, servers: dict[str, str]) -> dict[str, str]:
        for name, address in servers.items():
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
                raise ValueError(f"the server {name!r} must have an address such as http://127.0.0.1:8000")
        return {name: address.rstrip("/") for name, address in servers.items()}

    @field_validator("engine_server_keys")
    @classmethod
    def _keys_of_a_header(cls, keys: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for key in keys.values():
            usable_key(key.get_secret_value(), "FORESHOCK_ENGINE_SERVER_KEYS")
        return keys

    def shown(self) -> dict[str, str]:
        """Return the settings as text for a log, the API key masked."""
        texts = {name: str(getattr(self, name)) for name in type(self).model_fields}
        texts["url"] = shown_address(self.url)
        keys = dict.fromkeys(self.engine_server_keys, "set")
        named: dict[str, Mapping[str, object]]
        named = {"weights_roots": self.weights_roots, "engine_servers": self.engine_servers, "engine_server_keys": keys}
        for field, values in named.items():
            texts[field] = ", ".join(f"{name}={value}" for name, value in values.items()) or "none"
        texts["engine_servers_reload"] = ", ".join(sorted(self.engine_servers_reload)) or "none"
        texts["api_key"] = "set" if self.api_key else "not set"
        return texts


def parse_names(text: str) -> dict[str, str]:
    """Parse `name=value,other=value`. Raises ValueError, which does not show the values, if `text` has another form."""
    found: dict[str, str] = {}
    for number, part in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not value.strip() or name.strip() in found:
            raise ValueError(f"must have the form name=value,other=value, each name once; part {number} has not")
        found[name.strip()] = value.strip()
    return found


def load_settings(**overrides: object) -> WorkerSettings:
    """Return the settings of the environment, replaced by the `overrides` that are not None.

    Raises ConfigurationError, which names the variable, if a value is invalid.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return WorkerSettings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = "FORESHOCK_" + "_".join(str(part) for part in first["loc"]).upper()
        raise ConfigurationError(f"{name}: {first['msg']}") from error
