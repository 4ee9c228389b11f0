"""Presentation: the pages and the Prometheus exporter."""
