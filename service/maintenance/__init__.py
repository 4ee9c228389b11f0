"""Work that an operator starts by a command, over everything that is stored."""
