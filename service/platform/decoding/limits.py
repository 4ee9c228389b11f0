"""Limits on the size of an upload, from the settings."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from foreshock.rollouts import DecodeLimits

if TYPE_CHECKING:
    from foreshock_service.platform.settings import Settings


def decode_limits(settings: Settings) -> DecodeLimits:
    """Return the limits that a decoder checks before it decodes."""
    return DecodeLimits(**{field.name: getattr(settings, field.name) for field in fields(DecodeLimits)})


def stored_limits() -> DecodeLimits:
    """Return the limits for stored files: these were checked on upload, perhaps under wider limits."""
    return DecodeLimits(max_body_bytes=2**40, max_rollouts=2**31, max_tokens=2**40, max_uncompressed_bytes=2**40)
