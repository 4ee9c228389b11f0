"""The cheap test bed of the closed loop: `make bench-closed-loop`."""
