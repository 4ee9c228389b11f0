"""The Foreshock service: REST API, pages, background jobs and maintenance commands."""
