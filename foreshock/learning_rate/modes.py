"""The levers of the advice, the modes that each is in, and who decides on them."""

from typing import Final, Literal

AdviceMode = Literal["shadow", "apply"]
Author = Literal["detector", "operator", "trainer"]
Lever = Literal["rate", "correction", "rollback"]
BesideTheRate = Literal["correction", "rollback"]
BESIDE_THE_RATE: Final[tuple[BesideTheRate, ...]] = ("correction", "rollback")
