"""Log lines: which events become one, how they look, and how many there may be."""
