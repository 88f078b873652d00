"""Programs that try to break reliq for minutes or hours: chaos, mutants, soak, rates. Run by `.ci/do`."""
