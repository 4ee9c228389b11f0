"""The service's one settings object: `FORESHOCK_*` environment variables, typed, printable with secrets masked."""

from __future__ import annotations

import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError
from sqlalchemy.engine import make_url

from foreshock.errors import ConfigurationError
from foreshock.rollouts.schema import DecodeLimits
from foreshock.severity import Severity

ALERTMANAGER_SCHEMES = {"alertmanager": "http", "alertmanagers": "https"}
"""Scheme of a target that is an Alertmanager → scheme of its address."""


class NotificationTarget(BaseModel):
    """A target that is told about alerts; its URL may hold a token, so it is a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
    url: SecretStr = Field(description="of Apprise, such as slack://… or json://HOST, or alertmanager(s)://HOST:PORT")
    token: SecretStr | None = Field(default=None, description="Alertmanager: sent as `Authorization: Bearer …`")
    severity: Severity = Field(default="warning", description="the least severe alerts that are sent")
    projects: tuple[str, ...] = Field(default=(), description="empty: all")
    resolved: bool = Field(default=False, description="also say when an alert is resolved; Alertmanager is always told")
    verdicts: bool = Field(default=False, description="also say when a run's verdict changes; not for Alertmanager")

    @model_validator(mode="after")
    def _has_a_scheme(self) -> NotificationTarget:
        scheme, separator, rest = self.url.get_secret_value().partition("://")
        if not separator or not scheme or not rest:
            raise ValueError(
                "url must be a URL of Apprise, such as slack://… or json://HOST, or alertmanager://HOST:PORT"
            )
        if self.is_alertmanager:
            web_address(self.address)
        elif self.token is not None:
            raise ValueError("token is for Alertmanager only; other targets have it in their url")
        return self

    @property
    def is_alertmanager(self) -> bool:
        return self.url.get_secret_value().partition("://")[0] in ALERTMANAGER_SCHEMES

    @property
    def address(self) -> str:
        """The http(s) address of an Alertmanager, without a slash at its end."""
        scheme, _, rest = self.url.get_secret_value().partition("://")
        return f"{ALERTMANAGER_SCHEMES[scheme]}://{rest.rstrip('/')}"

    @property
    def tells_resolved(self) -> bool:
        return self.resolved or self.is_alertmanager


def web_address(value: str) -> str:
    """Return the address if it is http(s) without user or password; raise ValueError, without quoting it, if not."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// address")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a user or password")
    return value


_MEBIBYTE = 1024 * 1024
_LIMITS = DecodeLimits()
_MASK = "********"
_SECRETS = ("bootstrap_key", "session_secret", "store_access_key_id", "store_secret_access_key")


class Settings(BaseSettings):
    """All settings of the service. Sizes are bytes, durations seconds, unless the name has another unit."""

    model_config = SettingsConfigDict(env_prefix="FORESHOCK_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    processes: int = Field(default=1, ge=1, description="uvicorn processes; more than one requires PostgreSQL")
    database_url: str = "sqlite:///./foreshock-data/foreshock.db"
    database_connections: int = Field(
        default=80,
        ge=2,
        description="PostgreSQL connections of all processes together, beside six of each; its own default allows 100",
    )
    store_url: str = Field(default="./foreshock-data/tokens", description="a local folder, or s3://bucket/prefix")
    store_endpoint: str = Field(default="", description="http(s)://host:port of an S3-compatible store; empty: AWS")
    store_access_key_id: SecretStr | None = Field(
        default=None, description="with store_secret_access_key; unset: the environment's AWS credentials or role"
    )
    store_secret_access_key: SecretStr | None = None
    store_timeout_seconds: float = Field(default=30.0, gt=0, description="of one request to an S3-compatible store")
    store_temporary_folder: str = Field(
        default="./foreshock-data/temporary",
        description="folder on this machine for uploads under way, if the token store is not a folder itself",
    )
    orphan_grace_seconds: float = Field(
        default=86_400.0,
        gt=0,
        description="age at which a token file that no catalogue row names is removed; a slower upload is sent again",
    )
    allowed_hosts: str = Field(default="", description="comma-separated names besides loopback and FORESHOCK_HOST")
    bootstrap_key: SecretStr | None = Field(default=None, min_length=24, description="an admin key made at start")
    session_secret: SecretStr | None = Field(default=None, min_length=24, description="signs the pages' sessions")

    key_requests_per_second: float = Field(
        default=1000.0, ge=0, description="requests per second of one key in each process; 0: no limit"
    )
    key_uploads: int = Field(default=48, ge=0, description="uploads of one key at a time in each process; 0: no limit")

    max_body_bytes: int = Field(default=_LIMITS.max_body_bytes, gt=0)
    # Parsing 1 MiB holds the GIL for about 20 ms.
    max_json_bytes: int = Field(default=_MEBIBYTE, gt=0)
    max_tokens: int = Field(default=_LIMITS.max_tokens, gt=0, description="prompt and response tokens in one shard")

    decode_processes: int = Field(default=min(2, os.cpu_count() or 1), gt=0)
    # With 64 MiB a shard of 1 M tokens is refused.
    decode_memory_bytes: int = Field(
        default=4096 * _MEBIBYTE, ge=256 * _MEBIBYTE, description="address space above the idle size; at least 256 MiB"
    )
    decode_timeout_seconds: float = Field(default=300.0, gt=0)
    decode_queue: int = Field(default=64, gt=0, description="shards that may wait before clients get a 503")

    token_pass: Literal["compiled", "numpy"] = Field(
        default="compiled", description="what measures tokens; numpy is slower, and has nothing to compile at a start"
    )

    step_grace_seconds: float = Field(default=600.0, gt=0)
    stale_seconds: float = Field(
        default=300.0, gt=0, description="a running run without a sign of life of its clients for so long is stale"
    )
    sweep_interval_seconds: float = Field(default=5.0, gt=0)

    removal_grace_seconds: float = Field(
        default=172_800.0,
        ge=0,
        description="files of deleted and purged rollouts stay so long: longer than a backup takes",
    )
    retention_last_steps: int | None = Field(
        default=None, ge=1, description="tokens of the newest so many steps of a run are kept; not set: of all steps"
    )
    retention_alert_steps: int = Field(
        default=2, ge=0, description="tokens of so many steps before and after an alert are kept too"
    )
    retention_interval_seconds: float = Field(default=600.0, gt=0)

    shutdown_seconds: float = Field(
        default=30.0, gt=0, description="requests in flight that are finished before the service stops"
    )

    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_requests: bool = Field(default=False, description="one line for each request")

    lease_seconds: float = Field(default=60.0, gt=0, description="how long a worker keeps a job without a heartbeat")
    probe_tries: int = Field(default=3, gt=0, description="tries after which a probe's job is given up")
    exporter_max_runs: int = Field(
        default=1000, gt=0, description="running runs that /metrics shows, newest data first"
    )

    max_answer_values: int = Field(default=2_000_000, gt=0, description="values (rows × columns) of a columnar answer")

    tokenizers_folder: str = Field(
        default="",
        description="folder of tokenizers for the pages of rollouts, `<model>/tokenizer.json`; empty: token ids",
    )
    public_url: str = Field(
        default="", description="address at which people reach the pages, for links; empty: http://HOST:PORT"
    )
    grafana_url: str = Field(
        default="", description="address of a Grafana that has the dashboards, for links; empty: no links"
    )
    rules: str = Field(
        default="", description="TOML file that changes the alert rules of all runs; read at the start. Empty: defaults"
    )
    notifications: tuple[NotificationTarget, ...] = Field(
        default=(), description="JSON list of targets that are told about alerts"
    )

    @field_validator("bootstrap_key", mode="before")
    @classmethod
    def _without_white_space(cls, value: object) -> object:
        # A file with the key ends with a newline, which clients do not send.
        return value.strip() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_both_parts_of_the_key(self) -> Settings:
        if (self.store_access_key_id is None) != (self.store_secret_access_key is None):
            raise ValueError("set both FORESHOCK_STORE_ACCESS_KEY_ID and FORESHOCK_STORE_SECRET_ACCESS_KEY, or neither")
        return self

    @field_validator("store_endpoint", "public_url", "grafana_url")
    @classmethod
    def _is_web_address(cls, value: str) -> str:
        return value if not value else web_address(value)

    @field_validator("notifications")
    @classmethod
    def _have_names_of_their_own(cls, targets: tuple[NotificationTarget, ...]) -> tuple[NotificationTarget, ...]:
        names = [target.name for target in targets]
        if len(set(names)) < len(names):
            raise ValueError(f"each target needs a name of its own, got {', '.join(names)}")
        return targets

    @property
    def page_root(self) -> str:
        return (self.public_url or f"http://{self.host}:{self.port}").rstrip("/")

    def printable(self) -> dict[str, str]:
        """Return the name and value of every setting, with secrets and the database's password masked."""
        shown = {name: str(value) for name, value in self.model_dump().items()}
        for name in _SECRETS:
            shown[name] = _MASK if getattr(self, name) is not None else "(not set)"
        shown["notifications"] = ", ".join(each.name for each in self.notifications) or "(none)"
        # The URL of a store may contain a key.
        shown["store_url"] = re.sub(r"(?<=://)[^/@]*@", f"{_MASK}@", self.store_url)
        shown["database_url"] = make_url(self.database_url).render_as_string(hide_password=True)
        return {f"FORESHOCK_{name.upper()}": value for name, value in shown.items()}

    def secrets(self) -> set[str]:
        named = [getattr(self, name) for name in _SECRETS]
        named += [secret for target in self.notifications for secret in (target.url, target.token)]
        found = {secret.get_secret_value() for secret in named if secret is not None}
        password = make_url(self.database_url).password
        return found | ({str(password)} if password else set())

    @property
    def store_is_folder(self) -> bool:
        return not self.store_url.startswith("s3://")

    @property
    def store_folder(self) -> Path:
        """Return the folder on this machine that the store uses; raises ConfigurationError for an unknown URL."""
        if not self.store_is_folder:
            return Path(self.store_temporary_folder).absolute()
        if "://" in self.store_url and not self.store_url.startswith("file://"):
            raise ConfigurationError(
                "FORESHOCK_STORE_URL must be a folder, such as ./foreshock-data/tokens, or s3://bucket/prefix, got "
                f"{self.store_url}"
            )
        return Path(self.store_url.removeprefix("file://")).absolute()

    @property
    def connections_per_process(self) -> int:
        return max(1, self.database_connections // self.processes)

    @property
    def binds_loopback_only(self) -> bool:
        return is_loopback(self.host)

    @property
    def host_allow_list(self) -> frozenset[str]:
        """Host header names (without port, lower case) that requests may carry."""
        named = {part.strip().lower() for part in self.allowed_hosts.split(",") if part.strip()}
        own = set() if self.host in ("0.0.0.0", "::", "") else {self.host.lower()}
        return frozenset({"localhost", "127.0.0.1", "::1"} | named | own)


def load_settings() -> Settings:
    """Return the settings of the environment; raises ConfigurationError with the names of invalid variables."""
    try:
        return Settings()
    except SettingsError as error:
        # Not chained: its cause has the value, which may be a secret.
        raise ConfigurationError(f"{error}: it must be JSON") from None
    except ValidationError as error:
        faults = [_in_words(fault["loc"], fault["type"], fault["msg"]) for fault in error.errors(include_input=False)]
        raise ConfigurationError("; ".join(faults)) from None


def _in_words(place: tuple[int | str, ...], kind: str, message: str) -> str:
    """Return a fault's message with the name of the variable; `place` locates the value, such as a target's field."""
    message = message.removeprefix("Value error, ")
    if not place:
        return message
    variable, *inside = place
    parts = [f"FORESHOCK_{variable}".upper(), *(f"target {part + 1}" for part in inside[:1] if isinstance(part, int))]
    field = ".".join(str(part) for part in inside[1:])
    if kind == "missing":
        parts.append(f"{field} is required")
    elif kind == "extra_forbidden":
        parts.append(f"{field} is unknown; a target has {', '.join(NotificationTarget.model_fields)}")
    else:
        parts += [*([field] if field else []), message]
    return ": ".join(parts)


def is_loopback(host: str) -> bool:
    """Return True if a host name or address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
