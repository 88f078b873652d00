"""Publishes: from a body and its options to a receipt."""
