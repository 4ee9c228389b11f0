"""What the diagnosis finds, measured by families of cases."""
