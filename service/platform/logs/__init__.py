"""The service's log and traces: structured lines with a request id, without raw client bytes or secrets."""
