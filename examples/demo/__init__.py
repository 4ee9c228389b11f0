"""The demo: a recorded run logged over HTTP as a trainer would, replayed by real engines, diagnosed."""
