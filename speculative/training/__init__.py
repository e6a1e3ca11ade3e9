"""Training: a target learns from text, a draft from what the target writes."""
