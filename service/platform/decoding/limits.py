"""How large an upload may be, as the operator set it."""

from __future__ import annotations

from foreshock.rollouts import DecodeLimits
from service.platform.settings import Settings


def decode_limits(settings: Settings) -> DecodeLimits:
    """The limits that a decoder checks before it decodes."""
    return DecodeLimits(
        max_body_bytes=settings.max_body_bytes, max_rollouts=settings.max_rollouts, max_tokens=settings.max_tokens
    )


def stored_limits() -> DecodeLimits:
    """For the store's own files: they were checked when they came in, under limits that may have been wider then."""
    return DecodeLimits(max_body_bytes=2**40, max_rollouts=2**31, max_tokens=2**40, max_uncompressed_bytes=2**40)
