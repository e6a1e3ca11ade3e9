"""Every way in which parameters are laid out for decoding; each must give the same numbers."""

from collections.abc import Callable

from speculative.backends import prepack
from speculative.backends.tpu import lay_out
from speculative.types import PyTree

Layout = Callable[[PyTree], PyTree]

LAYOUTS: dict[str, Layout] = {
    "as stored": lambda params: params,
    "prepacked": prepack,
    "for a TPU": lambda params: lay_out(params, draft=False),
    "for a TPU's draft": lambda params: lay_out(params, draft=True),
}
