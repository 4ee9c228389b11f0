"""Results of probes: what workers send for their jobs, checked, stored, published with the job and read by step."""
