"""Measurements of the package, run from a checkout: `python -m benchmarks.compare_peers`."""
