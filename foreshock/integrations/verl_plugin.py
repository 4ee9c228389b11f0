"""Entry point of the group `verl.plugins`: verl imports this module in every process when it is imported itself.

Without `FORESHOCK_URL` it does nothing. Modules of verl are observed when verl imports them, and not before.
"""

import functools
import importlib
import logging
import os
from types import ModuleType

from foreshock.integrations.hooks import when_imported

__all__: list[str] = []

_logger = logging.getLogger(__name__)

_OBSERVED = (
    ("verl.trainer.ppo.ray_trainer", "verl", "observe_trainer"),
    ("verl.trainer.ppo.v1.trainer_base", "verl_v1", "observe_v1_trainer"),
    ("verl.utils.tracking", "verl", "observe_tracking"),
    ("verl.workers.engine_workers", "verl", "observe_workers"),
)
_OBSERVED_BY_NOTARY = (
    ("verl.workers.engine_workers", "verl_weights", "observe_sender"),
    ("verl.workers.rollout.vllm_rollout.utils", "verl_weights", "observe_vllm_worker"),
    ("verl.workers.rollout.vllm_rollout.vllm_async_server", "verl_weights", "observe_vllm_server"),
    ("verl.checkpoint_engine.base", "verl_weights", "observe_sync"),
)


def _observe(name: str, function: str, module: ModuleType) -> None:
    try:
        getattr(importlib.import_module(f"foreshock.integrations.{name}"), function)(module)
    except Exception:
        # This runs inside verl's own import of the module, which must succeed.
        _logger.exception("%s could not be observed, training continues", module.__name__)


if os.environ.get("FORESHOCK_URL"):
    _by_notary = _OBSERVED_BY_NOTARY if os.environ.get("FORESHOCK_NOTARY") == "1" else ()
    for _module, _name, _function in (*_OBSERVED, *_by_notary):
        when_imported(_module, functools.partial(_observe, _name, _function))
