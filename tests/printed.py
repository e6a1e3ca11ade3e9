"""What functions print to a console that is their last argument."""

import io
from collections.abc import Callable
from typing import Any

from speculative.reporting import tables


def printed(show: Callable[..., Any], *given: Any, width: int = 200) -> str:
    file = io.StringIO()
    show(*given, tables.console(file, width))
    return file.getvalue()
