"""The Prometheus exporter: /metrics, read from SQL aggregates at each scrape."""
