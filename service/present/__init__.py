"""What people and Prometheus read: the pages and the exporter."""
