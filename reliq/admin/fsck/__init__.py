"""`reliq check`: finds what contradicts the model in a queue, and repairs it."""
