"""Entry point of the group `verl.plugins`: verl imports this module in every process when it is imported itself.

Without `FORESHOCK_URL` it does nothing. Modules of verl are observed when verl imports them, and not before.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from foreshock.integrations.import_hooks import when_imported

__all__: list[str] = []

_OBSERVED = {
    "verl.trainer.ppo.ray_trainer": "observe_trainer",
    "verl.utils.tracking": "observe_tracking",
    "verl.workers.engine_workers": "observe_workers",
}


def _observe(function: str, module: ModuleType) -> None:
    getattr(importlib.import_module("foreshock.integrations.verl"), function)(module)


if os.environ.get("FORESHOCK_URL"):
    for _name, _function in _OBSERVED.items():
        when_imported(_name, lambda module, function=_function: _observe(function, module))  # type: ignore[misc]
