"""Read from the service: `Reader`, its async twin, and the records and columns that they return."""
