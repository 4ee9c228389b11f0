"""The name of this start of the service, which all its processes share and no other start has.

It is part of entity tags that are made from revisions alone: a database that was restored from a backup counts its
revisions again, and a restore needs a start.
"""

from __future__ import annotations

import os
import secrets

_VARIABLE = "_FORESHOCK_START"


def name_this_start() -> None:
    """Give this start its name, for the processes that are started next."""
    os.environ[_VARIABLE] = secrets.token_hex(8)


def name_of_start() -> str:
    """Return the name of this start; of a process that was started in another way, a name of its own."""
    if _VARIABLE not in os.environ:
        name_this_start()
    return os.environ[_VARIABLE]
