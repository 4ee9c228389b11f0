"""Reading what the service has: `Reader`, its async twin, and the records and columns that they return."""
