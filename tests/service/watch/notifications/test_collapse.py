"""A collapse by mismatch, as its alerts open: few messages, few episodes, and the way back to a good checkpoint."""

import numpy as np
import pytest

from foreshock.api.watch import AlertRecord
from foreshock.diagnosis.episodes import episodes_of
from tests.service.watch.notifications.conftest import Alerting
from tests.service.watch.recorded import K3, RecordedRun
from tests.service.working import announce_checkpoint

STEPS = range(1, 121)
RISES, FALLS = 50, 80


def collapsing() -> dict[str, np.ndarray]:
    """Return a run whose mismatch rises from step 50 on, and whose reward is gone between the steps 80 and 100."""
    random, step = np.random.default_rng(1), np.array(STEPS)
    k3 = 2e-4 * np.exp(np.clip(step - RISES, 0, 60) * 0.11) * np.exp(0.1 * random.normal(size=step.size))
    lost = np.clip((step - FALLS) / 20, 0, 1)
    pair = "trainer/rollout:"
    return {
        K3: k3,
        f"{pair}tokens": np.full(step.size, 50_000.0),
        f"{pair}chi2_token": 2 * k3,
        f"{pair}mean_ratio": 1 - k3 / 4,
        f"{pair}tail_2": np.minimum(k3, 0.5),
        f"{pair}mean_abs_d": np.sqrt(k3),
        f"{pair}training_ppl": 1.4 + 8 * lost,
        "rollout:reward_mean": 0.62 - 0.6 * lost + 0.01 * random.normal(size=step.size),
        "rollout:response_length_mean": 800 - 750 * lost,
    }


@pytest.fixture
def collapsed(alerting: Alerting) -> RecordedRun:
    """The run after its collapse; its checkpoints are announced, and the target is told as it goes."""
    run = RecordedRun(alerting.context.database, run=alerting.sender.run)
    for step, *row in zip(STEPS, *collapsing().values(), strict=True):
        run.close(step, dict(zip(collapsing(), row, strict=True)))
        if step % 20 == 5:
            announce_checkpoint(alerting.sender, step)
        alerting.notify(alerting.target())
    return run


def test_collapse_is_few_messages_and_one_way_back(collapsed: RecordedRun, alerting: Alerting) -> None:
    alerts = [AlertRecord(**each) for each in alerting.sender.get("alerts?state=open&limit=100").json()["items"]]
    assert len(alerts) >= 6
    assert len(alerting.receiver.bodies) <= 4
    collapse = next(body["message"] for body in alerting.receiver.bodies if "reward_collapse" in body["title"])
    assert "go back to the checkpoint of step 45" in collapse
    episodes = episodes_of(alerts)
    assert len(episodes) <= 3
    assert episodes[0][0].rule == "reward_collapse"
    found = alerting.sender.get("diagnosis").json()
    told = [each for each in found["events"] if each["is_told"]]
    assert len(told) == len(episodes)
    # The newest announced checkpoint from before the mismatch rose, and not the one from before the fall.
    assert "Stop, or go back to the checkpoint of step 45, the newest from before step 5" in found["next_steps"][0]
    assert found["short"].startswith("Collapsed: reward 0.62 → 0.0")
