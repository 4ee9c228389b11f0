"""How often Python's garbage collector looks at the objects of a process of the service."""

from __future__ import annotations

import gc

_YOUNG_OBJECTS = 20_000
"""Objects made before a collection looks at them; a small shard makes some thousands, which hold no cycles. Python's
own default is 700."""

_COLLECTIONS = 20
"""Collections of one generation before the next older one is looked at; Python's own default is 10."""


def spare_collections() -> None:
    """Keep what was imported out of later garbage collections, and collect less often.

    A full collection visits every object of the libraries and stops every request meanwhile; with a thousand polls
    that wait, whose objects are young for long, there were several at each change.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _COLLECTIONS, _COLLECTIONS)
