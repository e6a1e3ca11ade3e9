"""Runs, sweeps and reports: the paper's tables, measured again."""
