"""The result of `flush` and `close`: undelivered items, and the reason."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeliveryStatus"]


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """The items of a client that the service does not have. True in a condition only if it has everything.

    `undelivered` items are kept, in memory or in the spool, and are sent again; the other kinds are not.
    """

    undelivered: int = 0
    """Items that wait: the service is away, or refuses them for a reason that a change of configuration mends."""
    rejected: int = 0
    """Items that are invalid for the service; their bytes are in the spool's folder `rejected`."""
    dropped: int = 0
    """Items dropped because a limit of the client was reached, or it was closed."""
    invalid: int = 0
    """Calls with invalid arguments, or that could not be encoded: nothing was sent."""
    reason: str | None = None
    """The newest refusal or failure that keeps items from being delivered."""

    @property
    def complete(self) -> bool:
        """True if the service has every item that was logged."""
        return not (self.undelivered or self.rejected or self.dropped or self.invalid)

    def __bool__(self) -> bool:
        return self.complete

    def __str__(self) -> str:
        counts = {
            "not delivered": self.undelivered,
            "rejected": self.rejected,
            "dropped": self.dropped,
            "invalid": self.invalid,
        }
        text = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        if not text:
            return "everything was delivered"
        return f"{text} ({self.reason})" if self.reason else text
