"""What is measured of a pair: acceptance, times, exactness, quality."""
