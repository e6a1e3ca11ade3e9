"""The page of public names is that of the code, and signatures name what they take."""

import re

from scripts import api


def test_the_page_is_of_this_code() -> None:
    assert api.PAGE.read_text(encoding="utf-8") == api.page(), "run python scripts/api.py"


def test_signatures_name_what_they_take() -> None:
    text = api.page()
    assert not re.search(r"\*given|\*\*settings|settings: Settings, ", text)
    front = text.partition("## `speculative.checkpoints`")[0]
    for name in ("generate", "stream", "samples", "check"):
        assert re.search(rf"`{name}\(.*\*, gamma: int = 5, .*\) -> ", front)
    assert not re.search(r"\bAny\b", front)
