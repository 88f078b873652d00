"""Bodies to bytes and back."""
