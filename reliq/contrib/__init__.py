"""Parts of reliq for frameworks; each is imported by its framework alone."""
