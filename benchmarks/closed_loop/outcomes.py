"""What became of the runs of the cheap test bed, and the runs themselves, made once and kept in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.closed_loop import bed
from benchmarks.closed_loop.arms import ARMS, CONFIGURATION, REMEDY, SHAM, WITHOUT_FORESIGHT, Arm, Recorded
from benchmarks.closed_loop.bed import START_REWARD, Setting
from foreshock.diagnosis.collapse import collapse_step
from foreshock.learning_rate import control_loop, length_decay

Key = tuple[str, str, int]
"""Setting, arm, seed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    setting: str
    arm: str
    seed: int
    last_reward: float
    """Mean reward of the last fifth of the steps."""
    collapse: int | None
    """The step from which the reward is below half of its best for ten steps, also if it comes back later."""
    learning_rate_share: float
    """Mean scale over the steps."""
    scales: tuple[float, ...]
    law: str

    @property
    def is_lost(self) -> bool:
        """Whether the run ends below the reward that it started with."""
        return self.last_reward < START_REWARD

    @property
    def key(self) -> Key:
        return self.setting, self.arm, self.seed


def digest() -> str:
    """Return a digest of the loop's code and settings. With another digest the runs with advice are made again.

    After a change of the bed, delete the file.
    """
    law = b"".join(Path(str(part.__file__)).read_bytes() for part in (control_loop, length_decay))
    return hashlib.sha256(law + repr(CONFIGURATION.loop).encode()).hexdigest()[:12]


LAW: Final = digest()
_WITHOUT_LAW: Final = frozenset(arm.name for arm in WITHOUT_FORESIGHT)


def _law_of(arm: str) -> str:
    return "none" if arm in _WITHOUT_LAW else LAW


def read(path: Path) -> dict[Key, Outcome]:
    """Return the outcomes in a file that were made with the present loop."""
    if not path.exists():
        return {}
    found = [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
    return {each.key: each for each in found if each.law == _law_of(each.arm)}


def measure(path: Path, settings: Iterable[Setting], seeds: Sequence[int]) -> Mapping[Key, Outcome]:
    """Return the outcomes of all arms; those that the file lacks are made and added to it."""
    found = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:

        def make(setting: Setting, wanted: Sequence[tuple[Arm, int, Sequence[float]]]) -> None:
            missing = [each for each in wanted if (setting.name, each[0].name, each[1]) not in found]
            runs = [(seed, Recorded(arm, setting, scales)) for arm, seed, scales in missing]
            if runs:
                bed.run(setting, runs)
            for (arm, seed, _), (_, made) in zip(missing, runs, strict=True):
                outcome = _outcome(setting, arm, seed, made)
                found[outcome.key] = outcome
                print(json.dumps(asdict(outcome)), file=file, flush=True)

        for seed in seeds:
            for setting in settings:
                make(setting, [(arm, seed, ()) for arm in ARMS])
        for setting in settings:
            # Seeds are an even number from an even one: each has a partner.
            make(setting, [(SHAM, seed, found[setting.name, REMEDY.name, seed ^ 1].scales) for seed in seeds])
    return found


def _outcome(setting: Setting, arm: Arm, seed: int, made: Recorded) -> Outcome:
    rewards = [each.reward for each in made.measured]
    return Outcome(
        setting=setting.name,
        arm=arm.name,
        seed=seed,
        last_reward=float(np.mean(rewards[-(setting.steps // 5) :])),
        collapse=collapse_step([each.step for each in made.measured], rewards, 0.0),
        learning_rate_share=float(np.mean(made.scales)),
        scales=tuple(round(each, 4) for each in made.scales),
        law=_law_of(arm.name),
    )
