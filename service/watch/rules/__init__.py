"""The rules that a run is watched with: the defaults, and changes of its own from some step on."""
