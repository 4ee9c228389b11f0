"""`update_k3` of TRL's hook: what is scored again, and what it gives."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foreshock.client.reporting import LogOnce
from foreshock.integrations.trl_update import Update

torch = pytest.importorskip("torch")

ROLLOUTS, PROMPT, RESPONSE = 100, 3, 8


class Trainer:
    """Scores rollouts by a bias, which an update changes; it keeps how many it scored."""

    def __init__(self, distributed_type: str = "DistributedType.NO", processes: int = 1) -> None:
        self.accelerator = SimpleNamespace(
            is_main_process=True, distributed_type=distributed_type, num_processes=processes
        )
        self.model = SimpleNamespace()
        self.noise = torch.zeros(ROLLOUTS, RESPONSE)
        self.scored: list[int] = []

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, attention: Any, responses: int, batch_size: int | None = None, **_: Any
    ) -> Any:
        self.scored.append(len(ids))
        rows = ids[:, 0].long()
        return -1.0 + self.noise[rows], None, None


def batch() -> tuple[Any, Any]:
    """Return ids, whose first column numbers the rollouts, and an attention mask; responses have 1 to 8 tokens."""
    ids = torch.arange(ROLLOUTS)[:, None].repeat(1, PROMPT + RESPONSE)
    lengths = torch.arange(ROLLOUTS) % RESPONSE + 1
    attention = (torch.arange(PROMPT + RESPONSE) < PROMPT + lengths[:, None]).long()
    return ids, attention


def noted(trainer: Trainer, rollouts: int = 32, **keywords: Any) -> Update:
    update = Update(trainer, LogOnce("foreshock.tests"), rollouts)
    ids, attention = batch()
    result = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, RESPONSE)
    update.note((trainer.model, ids, attention, RESPONSE), {"batch_size": 8, **keywords}, result[0])
    trainer.scored.clear()
    return update


@pytest.mark.parametrize(("rollouts", "scored"), [(32, 15), (8, 8), (1, 1)])
def test_at_least_16_rollouts_are_scored_again_unless_fewer_are_asked_for(rollouts: int, scored: int) -> None:
    trainer = Trainer()
    noted(trainer, rollouts).measure()
    assert trainer.scored == [scored]


def test_rollouts_of_the_whole_step_are_scored_again_once() -> None:
    trainer = Trainer()
    update = noted(trainer)
    d = 0.1 * torch.randn(ROLLOUTS, RESPONSE, generator=torch.Generator().manual_seed(1))
    trainer.noise = d
    found = update.measure()
    _, attention = batch()
    rows = slice(None, None, 7)
    own = d[rows][attention[rows, -RESPONSE:] > 0].double().numpy()
    assert found == pytest.approx(np.mean(np.expm1(own) - own), rel=1e-5)
    assert update.measure() is None


def test_rows_of_the_loss_count_unless_the_rollouts_were_scored_before() -> None:
    trainer = Trainer()
    trainer.model = SimpleNamespace(training=True)
    update = Update(trainer, LogOnce("foreshock.tests"), 32)
    ids, attention = batch()

    def loss() -> None:
        found, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, RESPONSE)
        update.note_loss((trainer.model, ids, attention, RESPONSE), {"compute_entropy": True}, found.requires_grad_())

    loss()
    trainer.noise = trainer.noise + 0.1
    loss()
    assert update.measure() == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-5)
    trainer.model.training = False
    loss()
    assert update.measure() is None


def test_no_update_moves_nothing() -> None:
    assert noted(Trainer()).measure() == 0.0


@pytest.mark.parametrize(
    ("trainer", "rollouts", "keywords", "warned"),
    [
        (Trainer("DistributedType.FSDP", 2), 32, {}, "the weights are sharded (FSDP)"),
        (Trainer(), 32, {"pixel_values": torch.zeros(1)}, "pixel_values"),
        (Trainer(), 0, {}, ""),
    ],
)
def test_what_cannot_be_scored_again_is_left_out_with_a_warning(
    trainer: Trainer, rollouts: int, keywords: dict[str, Any], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert noted(trainer, rollouts, **keywords).measure() is None
    assert trainer.scored == []
    assert warned in caplog.text
    assert bool(caplog.text) is bool(warned)
