"""A queue's own fsck."""
