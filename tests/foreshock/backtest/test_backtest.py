"""Tests of the backtest: every format gives the same steps, definitions hold, and a prefix has the prefix's alarms."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.backtest.readers import UnreadableRun, read_run
from foreshock.backtest.replay import Episode, RecordedRun, replay_episodes
from foreshock.backtest.scoring import ALL_WARNINGS, LOWERS_RATE, lowering_of, score, scores_of, warnings_of
from foreshock.commands.backtest import command
from foreshock.diagnosis.collapse import collapse_step, hit_window
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.quantities import LENGTH_KEY, REWARD_KEY
from foreshock.diagnosis.statistics import poisson_interval, proportion_interval
from foreshock.errors import ConfigurationError

DEFAULT = WarningConfiguration()
ROWS = [(1, 100.0, 0.5), (2, 110.0, 0.25), (3, 120.0, -0.125)]


# The file's name, its first lines, and the lines of a step, whose number, length and reward are filled in.
LINES = {
    "csv": ("run.csv", "step,response_length_mean,reward\n", "%(s)d,%(n)s,%(r)s\n"),
    "jsonl": ("run.jsonl", "", '{"step": %(s)d, "response_length/mean": %(n)s, "critic/rewards/mean": %(r)s}\n'),
    "verl": (
        "verl.log", "starting\n",
        "(TaskRunner pid=7) step:%(s)d - response_length/mean:%(n)s - critic/score/mean:np.float64(%(r)s)\n",
    ),
    "verl file": (
        "verl.jsonl", "",
        '{"step": %(s)d, "data": {"response_length/mean": %(n)s, "critic/rewards/mean": %(r)s}}\n',
    ),
    "slime": (
        "slime.log", "",
        (
            "[2026-01-02 03:04:05] rollout.py:70 - perf %(s)d: {'rollout/response_len/mean': %(n)s, 'perf/x': 1.0}\n"
            "\x1b[36m(Actor pid=7)\x1b[0m rollout %(s)d: {'rollout/raw_reward': %(r)s, 'rollout/step': %(s)d}\n"
            "(Actor pid=7) step %(s)d: {'train/loss': -1e-05, 'train/kl': nan, 'train/step': %(s)d}\n"
        ),
    ),
    "prime-rl": (
        "metrics.jsonl", "",
        '{"step": %(s)d, "seq_len/all/mean": %(n)s}\n{"step": %(s)d, "reward/all/mean": %(r)s}\n',
    ),
    "wandb": (
        "wandb.csv",
        '"Step","a run - response_length/mean","a run - response_length/mean__MIN","a run - reward"\n',
        '"%(s)d","%(n)s","1","%(r)s"\n',
    ),
}  # fmt: skip
DOCUMENTS: dict[str, tuple[str, Any]] = {
    "trl": (
        "trainer_state.json",
        {"log_history": [{"step": s, "completions/mean_length": n, "reward": r} for s, n, r in ROWS]},
    ),
    "NeMo-RL": (
        "metrics.json",
        {"train/mean_gen_tokens_per_sample": {s: n for s, n, _ in ROWS}, "train/reward": {s: r for s, _, r in ROWS}},
    ),
    "wandb history": (
        "history.json",
        [
            {"_step": 7 * s, "train/global_step": s, "train/completions/mean_length": n, "train/reward": r}
            for s, n, r in ROWS
        ],
    ),
}  # fmt: skip


def written(folder: Path, kind: str) -> Path:
    """Return a file of this kind with the rows; the last line of JSON lines is cut off."""
    if kind in DOCUMENTS:
        name, document = DOCUMENTS[kind]
        text = json.dumps(document, indent=2)
    else:
        name, head, line = LINES[kind]
        text = head + "".join(line % {"s": s, "n": n, "r": r} for s, n, r in ROWS)
    path = folder / name
    path.write_text(text + ('{"step": 4, "resp' if kind == "jsonl" else ""))
    return path


@pytest.mark.parametrize("kind", [*LINES, *DOCUMENTS])
def test_every_format_gives_the_same_steps(tmp_path: Path, kind: str) -> None:
    assert read_run(written(tmp_path, kind)) == [
        ClosedStep(step, {LENGTH_KEY: length, REWARD_KEY: reward}) for step, length, reward in ROWS
    ]


@pytest.mark.parametrize(
    ("record", "measure", "value"),
    [
        ({"sampling/sampling_logp_difference/mean": 0.01}, "mean_abs_d", 0.01),
        ({"train/train_rollout_logprob_abs_diff": 0.02}, "mean_abs_d", 0.02),
        ({"mismatch_kl/all/mean": 3e-4}, "k3_kl", 3e-4),
        ({"train/gen_kl_error": 4e-4}, "k3_kl", 4e-4),
    ],
)
def test_mismatch_of_a_framework_is_read(tmp_path: Path, record: dict[str, float], measure: str, value: float) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [{"step": 1, **record}]}))
    assert read_run(path) == [ClosedStep(1, {f"trainer/rollout:{measure}": value})]


def test_export_of_tensorboard_is_one_quantity_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run_a-tag-response_length_mean.csv"
    path.write_text("Wall time,Step,Value\n1.5,1,100.0\n2.5,2,110.0\n")
    assert read_run(path) == [ClosedStep(1, {LENGTH_KEY: 100.0}), ClosedStep(2, {LENGTH_KEY: 110.0})]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"loss": 1.0}\n', "step,loss\n1,2\n"])
def test_file_without_known_quantities_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(UnreadableRun, match="no step with a reward, a length or a mismatch"):
        read_run(path)
    with pytest.raises(UnreadableRun, match="cannot read"):
        read_run(tmp_path / "absent.csv")


def test_collapse_is_halfway_to_the_floor_for_ten_observations() -> None:
    steps = list(range(1, 41))
    assert collapse_step(steps, [0.8] * 20 + [0.3] * 20, 0.0) == 23
    assert collapse_step(steps, [0.8] * 20 + [0.3] * 10 + [0.8] * 10, 0.0) == 23
    assert collapse_step(steps, [0.8] * 20 + [0.3] * 9 + [0.8] * 11, 0.0) is None
    assert collapse_step(steps, [0.8] * 20 + [0.5] * 20, 0.0) is None
    assert collapse_step(steps, [-0.5] * 20 + [-0.8] * 20, -1.0) == 23
    assert (hit_window(31).first, hit_window(31).last) == (15.5, 28)
    assert hit_window(900).first == 700


def test_score_counts_hits_late_and_false_alarms_apart() -> None:
    steps = tuple(range(1, 101))
    armed = tuple(step > 5 for step in steps)
    starts = (10, 60, 97, 120)
    episodes = tuple(Episode("r", "warning", start, start + 4) for start in starts)
    collapsed = RecordedRun("a", steps, armed, episodes, 99, usable=True)
    healthy = RecordedRun("b", steps, armed, (), None, usable=False)
    result = score("r", [collapsed, healthy], [episodes, ()])
    assert (result.hits, result.misses, result.leads, result.false_alarms) == (1, 0, (39,), 1)
    # Healthy time of the first run is steps 1-49: the hit window starts at 49.5.
    assert (result.healthy_observations, result.armed_observations) == (149, 139)
    assert result.healthy_share_in_alarm == 5 / 149


def test_rules_of_one_cause_that_overlap_are_one_alarm_together() -> None:
    steps, armed = tuple(range(1, 101)), (True,) * 100
    episodes = (
        Episode("k3", "warning", 10, 20, "mismatch", lowers_rate=True),
        Episode("chi2", "warning", 12, 40, "mismatch"),
        Episode("ess", "critical", 35, None, "mismatch", lowers_rate=True),
        Episode("fall", "warning", 36, 50, "reward"),
        Episode("skew", "info", 5, 90, "mismatch"),
    )
    run = RecordedRun("a", steps, armed, episodes, None, usable=False)
    assert [(each.start, each.end) for each in warnings_of(run)] == [(10, None), (36, 50)]
    # Apart from the others these two do not overlap.
    assert [(each.start, each.end) for each in lowering_of(run)] == [(10, 20), (35, None)]
    by_rule = {each.rule: each.false_alarms for each in scores_of([run])}
    assert by_rule == {ALL_WARNINGS: 2, LOWERS_RATE: 2, "k3": 1, "chi2": 1, "ess": 1, "fall": 1, "skew": 1}


def test_intervals_are_the_exact_ones() -> None:
    assert poisson_interval(0) == pytest.approx((0.0, 3.6889), abs=1e-3)
    assert poisson_interval(2) == pytest.approx((0.2422, 7.2247), abs=1e-3)
    assert proportion_interval(4, 600) == pytest.approx((0.00182, 0.01699), abs=1e-4)
    assert proportion_interval(0, 0) == (0.0, 1.0)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 120))
def test_alarms_of_a_prefix_are_those_of_the_run_truncated(seed: int, cut: int) -> None:
    random = np.random.default_rng(seed)
    lengths = 500.0 * np.exp(np.cumsum(random.normal(0.0, 0.15, 120)))
    rewards = np.clip(np.cumsum(random.normal(0.0, 0.08, 120)) + 0.5, 0.0, 1.0)
    steps = [
        ClosedStep(number, {LENGTH_KEY: float(length), REWARD_KEY: float(reward)})
        for number, (length, reward) in enumerate(zip(lengths, rewards, strict=True), start=1)
    ]
    whole, _ = replay_episodes(steps, WarningConfiguration())
    part, armed = replay_episodes(steps[:cut], WarningConfiguration())
    assert len(armed) == cut
    truncated = [each for each in whole if each.start <= cut]
    assert [(each.rule, each.start) for each in part] == [(each.rule, each.start) for each in truncated]
    assert all(mine.end in (each.end, None) for mine, each in zip(part, truncated, strict=True))


def collapsing(path: Path) -> Path:
    random = np.random.default_rng(0)
    lengths = np.r_[np.full(80, 500.0), np.full(80, 1800.0)] * np.exp(0.05 * random.normal(size=160))
    rewards = np.r_[np.full(120, 0.8), np.full(40, 0.1)] + 0.02 * random.normal(size=160)
    rows = zip(range(1, 161), lengths, rewards, strict=True)
    path.write_text("step,response_length_mean,reward\n" + "".join(f"{s},{n},{r}\n" for s, n, r in rows))
    return path


def test_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    file = str(collapsing(tmp_path / "run.csv"))
    assert command.run(parser.parse_args([file])) == 0
    text = capsys.readouterr().out
    assert text.startswith("1 of 1 collapses warned of, 39 steps before in the median.")
    assert "length_surge@84" in text
    assert command.run(parser.parse_args([file, "--full"])) == 0
    text = capsys.readouterr().out
    assert ALL_WARNINGS in text
    assert command.run(parser.parse_args([file, "--json"])) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["runs"][0]["collapse"] == 123
    surge = next(each for each in answer["rules"] if each["rule"] == "length_surge")
    assert (surge["hits"], surge["misses"], surge["leads"], surge["false_alarms"]) == (1, 0, [39], 0)
    assert {"length_surge", "reward_collapse", ALL_WARNINGS} <= {each["rule"] for each in answer["rules"]}
    # A surge at 81: the schedule of 145 steps halves once, for the last 16 of 160 steps.
    # The schedule of the surge, and the loop once the reward falls.
    assert 16 * 0.5 / 160 < answer["runs"][0]["learning_rate_sum_lost"] < 0.2


def test_rules_can_be_those_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    file, rules = str(collapsing(tmp_path / "run.csv")), tmp_path / "rules.toml"
    rules.write_text(
        "[schedule]\nmultiplier = 1.2\nfactor = 0.25\n[loop]\nenabled = false\n"
        "[rules.long]\nkey = 'rollout:response_length_mean'\nabsolute = 1000.0\n"
        "severity = 'warning'\nwhy = 'w'\nwhat_to_do = 'd'\n"
    )
    assert command.run(parser.parse_args([file, "--json", "--rules", str(rules)])) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "long" in {each["rule"] for each in answer["rules"]}
    assert answer["runs"][0]["learning_rate_sum_lost"] == pytest.approx(64 * 0.75 / 160)
    rules.write_text("[rules.long]\nabsolut = 3\n")
    with pytest.raises(ConfigurationError, match=r"rules\.toml, line 2: rule long has the unknown field 'absolut'"):
        command.run(parser.parse_args([file, "--rules", str(rules)]))


def test_share_of_healthy_time_has_an_interval_over_runs() -> None:
    steps, armed = tuple(range(1, 101)), (True,) * 100
    runs = [RecordedRun(str(number), steps, armed, (), None, usable=False) for number in range(10)]
    episodes = [(Episode("r", "warning", 1, 50),) if number < 2 else () for number in range(10)]
    result = score("r", runs, episodes)
    low, high = result.healthy_share_in_alarm_interval
    assert result.healthy_share_in_alarm == 0.1
    assert 0.0 <= low < 0.1 < high < 0.3
    assert score("r", runs[:1], episodes[:1]).healthy_share_in_alarm_interval == (0.0, 1.0)
