"""The `reliq` command: arguments and environment into settings, and settings into the parts below."""
