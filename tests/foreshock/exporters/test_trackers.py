"""TensorBoard, MLflow and trackio themselves: what they stored is read back with their own readers.

MLflow and trackio need other versions of packages than vLLM's, so they are in a folder beside the environment
(scripts/setup_environment.sh), and their tests run in a process that has it on its path.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreshock import Client
from tests.foreshock.exporters.trained import STEPS, curve, train
from tests.foreshock.running_service import RunningService
from tests.paths import PYTHONPATH

pytestmark = pytest.mark.slow

TRACKERS = Path(os.environ.get("FORESHOCK_TRACKERS", Path(sys.prefix) / "trackers"))

_MLFLOW = """
import json, sys
import mlflow
from foreshock import Client
from tests.foreshock.exporters.trained import curve, train

mlflow.set_tracking_uri("sqlite:///mlflow.db")
with mlflow.start_run() as run:
    client = Client(sys.argv[1], run_key="mlflow", attempt_key="a", spool_directory="spool", export="mlflow")
    train(client, lambda step: mlflow.log_metric("reward", step / 10, step=step))
    assert client.close()
stored = mlflow.MlflowClient()
history = {name: [(each.step, each.value) for each in stored.get_metric_history(run.info.run_id, name)]
           for name in ("reward", "foreshock/k3_kl", "foreshock/alerts/critical", "foreshock/lr_scale")}
page = stored.get_run(run.info.run_id).data.tags["foreshock/page"]
print(json.dumps({"history": history, "page": page, "service": list(curve(client, "k3_kl").items())}))
"""

_TRACKIO = """
import json, sqlite3, sys
import trackio
from foreshock import Client
from trackio.sqlite_storage import SQLiteStorage
from tests.foreshock.exporters.trained import curve, train

run = trackio.init(project="foreshock-tests", embed=False)
client = Client(sys.argv[1], run_key="trackio", attempt_key="a", spool_directory="spool", export="trackio")
train(client, lambda step: trackio.log({"reward": step / 10}, step=step))
assert client.close()
trackio.finish()
rows = SQLiteStorage.get_logs("foreshock-tests", run.name)
history = {name: [(row["step"], row[name]) for row in rows if row.get(name) is not None]
           for name in ("reward", "foreshock/k3_kl", "foreshock/alerts/critical", "foreshock/lr_scale")}
print(json.dumps({"history": history, "page": "", "service": list(curve(client, "k3_kl").items())}))
"""


@pytest.mark.parametrize(("name", "code"), [("mlflow", _MLFLOW), ("trackio", _TRACKIO)])
def test_steps_are_in_the_trackers_store(shared_service: RunningService, tmp_path: Path, name: str, code: str) -> None:
    if not (TRACKERS / name).is_dir():
        message = f"{name} is not in {TRACKERS}: scripts/setup_environment.sh test installs it"
        pytest.fail(message) if os.environ.get("CI", "").lower() == "true" else pytest.skip(message)
    environment = os.environ | {
        "PYTHONPATH": f"{TRACKERS}{os.pathsep}{PYTHONPATH}",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, shared_service.url],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    history = {key: dict(points) for key, points in result["history"].items()}
    assert [step for step, _ in sorted(result["history"]["foreshock/k3_kl"])] == list(STEPS), "each step once"
    assert history["foreshock/k3_kl"] == pytest.approx(dict(result["service"]))
    assert history["reward"] == pytest.approx({step: step / 10 for step in STEPS})
    assert set(history["foreshock/lr_scale"]) == set(history["foreshock/alerts/critical"]) == set(STEPS)
    if name == "mlflow":
        assert result["page"].startswith(f"{shared_service.url}/runs/")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_event_file_of_tensorboard(
    make: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "logs"))
    client = make("tensorboard", export="tensorboard")
    train(client, lambda step: None)
    assert client.close()
    events = EventAccumulator(str(tmp_path / "logs" / "foreshock"), size_guidance={"scalars": 0})
    events.Reload()
    assert "foreshock/lr_scale" in events.Tags()["scalars"]
    points = events.Scalars("foreshock/k3_kl")
    assert sorted(point.step for point in points) == list(STEPS), "each step once"
    stored = {point.step: point.value for point in points}
    assert stored == pytest.approx(curve(client, "k3_kl"), rel=1e-6)
