"""`wmt_t2t_ende_v003`: WMT English to German, as T5's task of that name reads it.

The validation split is newstest2013, the test split newstest2014.
"""

from speculative.tasks.registration import register_tfds

register_tfds(
    "wmt_t2t_ende_v003",
    "wmt_t2t_translate/de-en:1.0.0",
    ("train", "validation", "test"),
    inputs="en",
    targets="de",
)
