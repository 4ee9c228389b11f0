"""Results of probes: sent by workers for their jobs, checked, stored, published with the job, and read by step."""
