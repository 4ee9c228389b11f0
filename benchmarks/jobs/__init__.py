"""Jobs of probe workers under kills: `make bench-jobs`."""
