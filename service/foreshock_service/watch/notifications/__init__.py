"""Notifications: alerts are sent to the webhooks of the configuration, through an outbox in the database."""
