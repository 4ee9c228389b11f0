"""Entry point of the group `verl.plugins`: verl imports this module in every process when it is imported itself.

Without `FORESHOCK_URL` it does nothing. Modules of verl are observed when verl imports them, and not before.
"""

import importlib
import logging
import os
from types import ModuleType

from foreshock.integrations.hooks import when_imported

__all__: list[str] = []

_logger = logging.getLogger(__name__)

_OBSERVED = {
    "verl.trainer.ppo.ray_trainer": ("verl", "observe_trainer"),
    "verl.trainer.ppo.v1.trainer_base": ("verl_v1", "observe_v1_trainer"),
    "verl.utils.tracking": ("verl", "observe_tracking"),
    "verl.workers.engine_workers": ("verl", "observe_workers"),
}


def _observe(observer: tuple[str, str], module: ModuleType) -> None:
    try:
        getattr(importlib.import_module(f"foreshock.integrations.{observer[0]}"), observer[1])(module)
    except Exception:
        # This runs inside verl's own import of the module, which must succeed.
        _logger.exception("%s could not be observed, training continues", module.__name__)


if os.environ.get("FORESHOCK_URL"):
    for _name, _observer in _OBSERVED.items():
        when_imported(_name, lambda module, observer=_observer: _observe(observer, module))  # type: ignore[misc]
