"""Faults put into reliq on purpose, one at a time, and who notices. `python -m tests.harness.mutants`."""
