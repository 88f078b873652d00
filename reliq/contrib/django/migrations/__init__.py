"""The migrations of reliq's tables."""
