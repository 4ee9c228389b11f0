"""Rollouts: the catalogue of uploaded shards, what is measured of each shard, and single tokens."""
