"""Hardware: the workers and accelerators, and the jobs that wait for each accelerator."""
