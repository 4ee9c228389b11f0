"""Plant the change that FORESHOCK_PLANTED names. Python imports this module at the start of each process."""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_ENGINE, _TRAINER = "foreshock_probes.scorers.vllm_engine", "foreshock_probes.scorers.torch_forward"


class _Planter(importlib.abc.MetaPathFinder):
    """Calls `benchmarks.certify.faults.plant` after the import of a module that faults change."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in (_ENGINE, _TRAINER):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        loader: Any = spec.loader if spec is not None else None
        plain = loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            importlib.import_module("benchmarks.certify.faults").plant(module, os.environ["FORESHOCK_PLANTED"])

        loader.exec_module = exec_module
        return spec


if os.environ.get("FORESHOCK_PLANTED"):
    sys.meta_path.insert(0, _Planter())
