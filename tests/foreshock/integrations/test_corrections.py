"""Corrections in the frameworks' settings: set in mid-run, taken back, or refused with what to configure."""

from types import SimpleNamespace
from typing import Any

import pytest

from foreshock.client.reporting import LogOnce
from foreshock.integrations.corrections import of_trl, of_verl
from foreshock.integrations.trainer_run import TrainerRun, of_the_leader
from foreshock.learning_rate.levers import Correction

omegaconf = pytest.importorskip("omegaconf")

TIS, MIS, ICEPOP = Correction("token_tis", "2"), Correction("sequence_mis", "2"), Correction("icepop", "0.5_5")


def trl_trainer(**changed: Any) -> SimpleNamespace:
    """Return what the settings read of a `GRPOTrainer`, with its defaults."""
    names = {"correction": True, "mode": "sequence_mask", "clip_max": 3.0, "clip_min": None}
    known = {f"vllm_importance_sampling_{name}": value for name, value in names.items()}
    return SimpleNamespace(**{**known, "use_vllm": True, "loss_type": "dapo", **changed})


def trl_set(trainer: SimpleNamespace) -> tuple[Any, ...]:
    return tuple(vars(trainer).get(f"vllm_importance_sampling_{name}") for name in ("mode", "clip_max", "clip_min"))


@pytest.mark.parametrize(
    ("correction", "expected"),
    [(TIS, ("token_truncate", 2.0, None)), (MIS, ("sequence_mask", 2.0, None)), (ICEPOP, ("token_mask", 5.0, 0.5))],
)
def test_trl_reads_the_correction_from_its_trainer(correction: Correction, expected: tuple[Any, ...]) -> None:
    trainer = trl_trainer()
    change = of_trl(trainer)
    assert change(correction) is None
    assert trl_set(trainer) == expected
    assert change(None) is None
    assert trl_set(trainer) == ("sequence_mask", 3.0, None)


def test_first_releases_of_trl_have_an_upper_bound_only() -> None:
    trainer = SimpleNamespace(
        vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_cap=3.0, use_vllm=True,
    )  # fmt: skip
    change = of_trl(trainer)
    assert change(TIS) is None
    assert (trainer.vllm_importance_sampling_mode, trainer.vllm_importance_sampling_cap) == ("token_truncate", 2.0)
    assert "no lower bound" in (change(ICEPOP) or "")


@pytest.mark.parametrize(
    ("trainer", "correction", "refused"),
    [
        (SimpleNamespace(use_vllm=True), TIS, "has no importance-sampling correction"),
        (trl_trainer(use_vllm=False), TIS, "use_vllm=True"),
        (
            trl_trainer(vllm_importance_sampling_correction=False),
            TIS,
            "vllm_importance_sampling_mode='token_truncate', vllm_importance_sampling_clip_max=2.0",
        ),
        (trl_trainer(loss_type="vespo"), MIS, "VESPO"),
    ],
)
def test_trl_refuses_what_it_cannot_change_now(trainer: SimpleNamespace, correction: Correction, refused: str) -> None:
    before = dict(vars(trainer))
    assert refused in (of_trl(trainer)(correction) or "")
    assert vars(trainer) == before


def verl_trainer(correction: dict[str, Any] | None, calculates: bool = True) -> Any:
    known = {
        "algorithm": {"rollout_correction": correction},
        "actor_rollout_ref": {"rollout": {"calculate_log_probs": calculates}},
    }
    config = omegaconf.OmegaConf.create(known)
    omegaconf.OmegaConf.set_struct(config, True)
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(
    ("correction", "level", "threshold"),
    [(TIS, "token", 2.0), (ICEPOP, "token", "0.5_5"), (MIS, "sequence", "1e-09_2")],
)
def test_verls_node_is_changed_in_place(correction: Correction, level: str, threshold: Any) -> None:
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    trainer = verl_trainer({"bypass_mode": False, "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None})
    node = trainer.config.algorithm.rollout_correction
    change = of_verl(trainer)
    assert change(correction) is None
    assert (node.rollout_is, node.rollout_is_threshold) == (level, threshold)
    assert _parse_rollout_is_threshold(node.rollout_is_threshold)[0] == correction.bounds.upper
    assert change(None) is None
    assert (node.rollout_is, node.rollout_is_threshold) == (None, 2.0)


def test_verl_without_a_node_gets_one() -> None:
    trainer = verl_trainer(None)
    assert of_verl(trainer)(TIS) is None
    assert trainer.config.algorithm.rollout_correction == {"rollout_is": "token", "rollout_is_threshold": 2.0}


@pytest.mark.parametrize(
    ("trainer", "refused"),
    [
        (verl_trainer({"bypass_mode": True}), "in bypass mode the workers correct"),
        (verl_trainer({"bypass_mode": False}, calculates=False), "calculate_log_probs=True"),
    ],
)
def test_verl_refuses_with_what_to_configure(trainer: Any, refused: str) -> None:
    reason = of_verl(trainer)(TIS) or ""
    assert refused in reason
    assert "algorithm.rollout_correction.rollout_is=token" in reason


class Feed:
    def __init__(self) -> None:
        self.reports: list[Any] = []

    def report(self, *report: Any) -> None:
        self.reports.append(report)


def test_what_was_done_is_reported_and_a_refusal_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    answers: dict[Correction | None, str | None] = {TIS: None, MIS: "it cannot", None: None}
    feed: Any = Feed()
    run = TrainerRun("mine", LogOnce("foreshock.tests"), answers.__getitem__)
    run.feed = feed
    run.correct(None, 1)
    for step, correction in enumerate((TIS, MIS, MIS, None), 2):
        run.correct(correction, step)
    assert feed.reports == [
        ("correction", 2, TIS, None),
        ("correction", 3, None, "it cannot"),
        ("correction", 4, None, "it cannot"),
        ("correction", 5, None, None),
    ]
    assert caplog.text.count("the advised correction is not applied: it cannot") == 1


def test_one_process_takes_its_own_decisions() -> None:
    assert of_the_leader((0.5, TIS), lambda: None) == (0.5, TIS)
    assert of_the_leader(None, lambda: None) == (1.0, None)
