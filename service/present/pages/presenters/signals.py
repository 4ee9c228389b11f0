"""Names of the same scalar in different trainers."""

from __future__ import annotations

GRADIENT_NORMS = ("grad_norm", "actor/grad_norm", "train/grad_norm")
ENTROPIES = ("entropy", "actor/entropy", "actor/entropy_loss")
LEARNING_RATES = ("lr", "learning_rate", "actor/lr", "train/learning_rate")
REWARDS = ("reward", "critic/rewards/mean", "train/reward")
