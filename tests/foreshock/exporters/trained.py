"""A short training run that is exported: step 2 closes after steps 3 to 5, because its second shard comes late."""

from collections.abc import Callable

from foreshock import Client
from tests.foreshock.batches import random_batch
from tests.foreshock.client.trainer import get

STEPS = range(1, 7)
LATE_STEP = 2


def train(client: Client, log_reward: Callable[[int], None]) -> None:
    """Log six steps and their rewards."""
    client.start_run(model="M", initial_learning_rate=1e-6)
    for step in STEPS:
        batch = random_batch(step)
        half = batch.num_rollouts // 2
        if step == LATE_STEP:
            client.log_rollouts(step, batch.select(range(half)), shard=0, shards=2)
        else:
            client.log_rollouts(step, batch)
        log_reward(step)
        if step == 5:
            late = random_batch(LATE_STEP)
            client.log_rollouts(LATE_STEP, late.select(range(half, late.num_rollouts)), shard=1, shards=2)
        elif step != LATE_STEP:
            assert client.flush(300)
    assert client.flush(300)


def curve(client: Client, measure: str) -> dict[int, float]:
    """Return what the service has: step → value of `measure`."""
    columns = get(client, "/measurements", comparison="trainer/rollout", measure=measure)["columns"]
    return dict(zip(columns["step"], columns[measure], strict=True))
