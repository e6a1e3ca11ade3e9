"""Training: a target on text, a draft on what the target writes."""
