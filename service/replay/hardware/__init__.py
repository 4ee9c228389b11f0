"""Hardware: the workers that were seen and what waits for which accelerator."""
