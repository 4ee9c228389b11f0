"""Health: the newest steps of a run, pooled and judged with their intervals."""
