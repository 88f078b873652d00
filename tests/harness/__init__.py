"""Long-running tests of reliq, for minutes or hours: chaos, mutants, soak, rates. Run them with `.ci/do`."""
