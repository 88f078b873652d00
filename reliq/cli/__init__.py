"""The `reliq` command: it turns arguments and environment into settings, and calls the parts below with them."""
