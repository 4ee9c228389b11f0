"""Stand-in for torchvision, whose builds do not match a CPU torch. It has any submodule and any name; nothing works.

SGLang and transformers import it for images, which text models do not have.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

__version__ = "0.0.0"


class _AnySubmodule(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("torchvision.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=f"torchvision {name}")


sys.meta_path.append(_AnySubmodule())
