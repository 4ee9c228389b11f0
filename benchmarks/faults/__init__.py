"""Kill the service and the trainer's client at random and at named points, and break what they rely on."""
