"""The example of a scorer in a package of its own is installed and scores in an engine's process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import PYTHONPATH, REPOSITORY
from tests.probes.tiny import save_checkpoint

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys, tempfile
from pathlib import Path
import numpy as np
from tests.probes.replaying import Asked, scored
from foreshock.scorers import REFERENCE, REFUSED_SCORERS
from foreshock_probes.offers import installed_scorers
from tests.probes.tiny import make_rollouts

with tempfile.TemporaryDirectory() as folder:
    asked = (Asked(make_rollouts(9), Path(sys.argv[1]), name) for name in ("torch.float64", REFERENCE))
    (exact, made_by), (reference, _) = scored(Path(folder), *asked)
print(json.dumps({
    "offered": "torch.float64" in installed_scorers(),
    "refused": REFUSED_SCORERS,
    "dtype": made_by.dtype,
    "largest": float(np.abs(exact - reference).max()),
}))
"""


def test_installed_package_adds_its_scorer_to_workers(tmp_path: Path) -> None:
    weights = save_checkpoint(tmp_path / "weights", seed=1)
    source = tmp_path / "source"
    source.mkdir()
    for path in (REPOSITORY / "examples" / "scorer_package").glob("*.*"):
        (source / path.name).write_bytes(path.read_bytes())
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(packages), str(source)], check=True)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([PYTHONPATH, str(packages)])}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(weights)]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["offered"], found["refused"], found["dtype"]) == (True, [], "float64")
    assert 0 < found["largest"] < 1e-4
