"""Steps: all rollouts of one training step. A step closes when all its shards are stored or its grace time is over."""
