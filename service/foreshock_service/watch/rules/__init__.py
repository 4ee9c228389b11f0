"""The rules that watch a run: the defaults, and the run's own changes from some step on."""
