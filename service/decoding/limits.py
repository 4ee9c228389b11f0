"""How large an upload may be, as the operator set it."""

from __future__ import annotations

from foreshock.rollouts import DecodeLimits
from service.settings import Settings


def decode_limits(settings: Settings) -> DecodeLimits:
    """The limits that a decoder checks before it decodes."""
    return DecodeLimits(
        max_body_bytes=settings.max_body_bytes, max_rollouts=settings.max_rollouts, max_tokens=settings.max_tokens
    )
