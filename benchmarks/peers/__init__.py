"""Other programs that decode T5; `benchmarks.compare_peers` runs those that are installed."""
