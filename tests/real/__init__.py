"""Real weights, which `make test-real` brings; the suite skips these."""
