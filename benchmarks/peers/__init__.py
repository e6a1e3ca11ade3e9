"""Programs that decode the same models; `benchmarks.compare_peers` runs the installed ones."""
