"""The runs of the closed loop: settings, arms, seeds, and their order. Committed before the loop's first run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from examples.collapses.grid import DOSES, RunSettings, ShiftedDose

Arm = Literal[
    "twin", "constant", "advice", "tenth", "cosine", "token-tis", "sequence-mis", "matched", "sham", "length-decay",
    "advice-mis",
]  # fmt: skip

ARMS: Final[dict[Arm, str]] = {
    "twin": "constant η₀ without mismatch: the trainer's own forward pass samples",
    "constant": "constant η₀",
    "advice": "η₀ × the advised scale: the control loop with its default gains, apply mode",
    "tenth": "constant 0.1 · η₀",
    "cosine": "η₀ · (1 + cos(π · (step − 1) / steps)) / 2",
    "token-tis": "constant η₀; weights min(ρ, 2) of tokens",
    "sequence-mis": "constant η₀; weights ρ_seq · 1{ρ_seq ≤ 2} of sequences",
    "matched": "constant learning rate with the Σ η of the advice arm of the same seed",
    "sham": "η₀ × the scale that the advice arm of the partner seed got",
    "length-decay": "η₀ × the scale of the length-decay schedule alone",
    "advice-mis": "η₀ × the advised scale, and the weights of `sequence-mis`",
}

RATIO_CAP: Final = 2.0
"""C of both corrections, the usual threshold in `foreshock/corrections/catalogue.py`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A dose of mismatch and a learning rate."""

    dose: str
    learning_rate: float

    @property
    def name(self) -> str:
        return f"{self.dose}-lr{self.learning_rate:g}"


SHIFT: Final = ShiftedDose("shift", "lag of 8 steps from step 61 to step 105, else none", lag=8, first=61, last=105)

SETTINGS: Final = (
    Setting("lag8", 1e-4),
    Setting("lag4", 2e-4),
    Setting("lag2", 2e-4),
    Setting("partial", 2e-4),
    Setting("none", 3e-4),
    Setting("shift", 1e-4),
)
"""The first two were chosen on the tuning part of the benchmark of collapses: run of seed 0 collapsed and its twin did
not. In `none` the learning rate is too high without any mismatch."""

HARM: Final = tuple(Setting(dose, 1e-4) for dose in ("w4", "kv-fp8", "bf16", "w8", "none"))
"""Settings that learn well with a constant rate: the advice must leave them alone."""

FIRST_SEED: Final = 1010
"""No arm was run on these seeds before the loop of commit `LAW_FIXED_AT` was fixed. Seeds 1000 to 1009 count as tuning:
earlier loops were run on them."""

SEEDS: Final = 12

LAW_FIXED_AT: Final = "367afaa7"
"""The commit that fixed the settings and gains of the loop, before the first run with them."""

_COMPARED: Final[tuple[Arm, ...]] = ("constant", "advice", "cosine", "sequence-mis")
_HARMED: Final[tuple[Arm, ...]] = ("constant", "advice")

TIERS: Final[tuple[tuple[tuple[Setting, ...], tuple[Arm, ...], int], ...]] = (
    (SETTINGS, (*_COMPARED, "sham"), 4),
    (HARM, _HARMED, 2),
    (SETTINGS, (*_COMPARED, "sham", "advice-mis"), SEEDS),
    (HARM, _HARMED, SEEDS),
    (SETTINGS, tuple(ARMS), SEEDS),
)
"""Settings, arms and seeds in the order in which they are run: what tells most first. A run is made once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the closed loop."""

    setting: Setting
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting.name}-{self.arm}-seed{self.seed}"

    @property
    def partner(self) -> int:
        """The seed whose advice the sham arm gets: seeds are paired, 1010 with 1011 and so on."""
        return self.seed + 1 if (self.seed - FIRST_SEED) % 2 == 0 else self.seed - 1

    def of(self, arm: Arm, seed: int | None = None) -> Plan:
        """Return the run of another arm, of this seed or another."""
        return Plan(self.setting, arm, self.seed if seed is None else seed)

    @property
    def settings(self) -> RunSettings:
        """All steps are made, also after a collapse: a run that comes back is not lost."""
        name = "none" if self.arm == "twin" else self.setting.dose
        dose = next(each for each in (*DOSES, SHIFT) if each.name == name)
        return RunSettings(dose, self.setting.learning_rate, self.seed, steps_after_collapse=10**6, fixed_every=10**6)

    def to_json(self) -> dict[str, Any]:
        return self.settings.to_json() | {"setting": self.setting.name, "arm": self.arm}


def plans(seeds: int = SEEDS) -> list[Plan]:
    """Return the runs in their order: tiers, in each pairs of seeds, in each settings, arms, and both seeds.

    `seeds` must be even. What is compared stands side by side, so that any prefix is balanced over arms.
    """
    if seeds < 2 or seeds % 2:
        raise ValueError(f"seeds must be even and at least 2, as the sham arm pairs them; got {seeds}")
    ordered = [
        Plan(setting, arm, FIRST_SEED + first + place)
        for settings, arms, most in TIERS
        for first in range(0, min(seeds, most), 2)
        for setting in settings
        for arm in arms
        for place in range(2)
    ]
    return list(dict.fromkeys(ordered))
