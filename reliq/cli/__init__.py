"""The command `reliq`."""
