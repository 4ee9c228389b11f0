"""Workers: when each was last seen, what it offers, and which of them count as live."""
