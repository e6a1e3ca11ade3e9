"""`lm1b`: sentences of the One Billion Word benchmark, written from nothing: inputs are empty."""

from speculative.tasks.registration import register_tfds

register_tfds("lm1b", "lm1b:1.1.0", ("train", "test"), inputs=None, targets="text")
