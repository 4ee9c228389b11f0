"""Attribution: where a step's mismatch comes from, computed from the rollouts' logged scores and the replayed ones."""
