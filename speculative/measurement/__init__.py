"""Measurements of a pair: acceptance, times, exactness, quality."""
