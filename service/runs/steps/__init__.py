"""Steps: all rollouts of one training step; they close when every shard is there or the grace time is over."""
