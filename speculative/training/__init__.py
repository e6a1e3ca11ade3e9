"""Training: a target learns from text, a draft from the target's outputs."""
