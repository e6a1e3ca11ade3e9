"""What functions print to a console that is their last argument."""

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console


def printed(show: Callable[..., Any], *given: Any, width: int = 200) -> str:
    file = io.StringIO()
    show(*given, Console(file=file, width=width))
    return file.getvalue()
