"""T5's tasks: TFDS holds their data, and T5's vocabulary tokenises it.

T5 itself reads version 3.1.0 of cnn_dailymail, which has a space before the full stop of a
highlight; TFDS now offers only 3.4.0, which has none. Both have one line for each highlight. WMT's
validation split is newstest2013, its test split newstest2014; lm1b has no inputs.
"""

import seqio

from speculative.tasks.registration import register, t5_vocabulary

_SPLITS = ("train", "validation", "test")  # TFDS would otherwise look for them on the network.
for _name, _dataset, _splits, _inputs, _targets in (
    ("wmt_t2t_ende_v003", "wmt_t2t_translate/de-en:1.0.0", _SPLITS, "en", "de"),
    ("cnn_dailymail_v002", "cnn_dailymail:3.4.0", _SPLITS, "article", "highlights"),
    ("lm1b", "lm1b:1.1.0", ("train", "test"), None, "text"),
):
    _source = seqio.TfdsDataSource(_dataset, splits=_splits)
    register(_name, _source, t5_vocabulary(), _inputs, _targets)
