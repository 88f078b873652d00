"""Mutation tests: put one fault at a time into reliq and see which tests fail. `python -m tests.harness.mutants`."""
