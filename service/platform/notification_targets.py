"""The settings of a notification target. Targets come from the configuration only: no request can name an address."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator

from foreshock.severity import Severity


class NotificationTarget(BaseModel):
    """A webhook that is told about alerts; its address may hold a token, so it is a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
    kind: Literal["json", "slack", "alertmanager"]
    url: SecretStr = Field(description="Alertmanager: its root, such as http://alertmanager:9093")
    token: SecretStr | None = Field(default=None, description="sent as `Authorization: Bearer …`")
    severity: Severity = Field(default="warning", description="the least severe alerts that are sent")
    projects: tuple[str, ...] = Field(default=(), description="empty: all")
    resolved: bool = Field(default=False, description="also say when an alert is resolved; Alertmanager is always told")

    @field_validator("url")
    @classmethod
    def _is_web_address(cls, value: SecretStr) -> SecretStr:
        web_address(value.get_secret_value())
        return value

    @property
    def tells_resolved(self) -> bool:
        """True if the end of an alert is sent."""
        return self.resolved or self.kind == "alertmanager"


def web_address(value: str) -> str:
    """Return the address if it is http(s) without user or password; raise ValueError, without quoting it, if not."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// address")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a user or password: use `token`")
    return value
