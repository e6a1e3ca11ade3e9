"""The shipped prompts: enough of them, with prefixes, and told by name."""

import pytest

from speculative.measurement.prompts import PREFIXES, load_prompts


@pytest.mark.parametrize(
    ("task", "least", "prefix"),
    [("debian_ende", 40, "translate English to German: "), ("debian_synopsis", 20, "summarize: ")],
)
def test_the_shipped_prompts(task: str, least: int, prefix: str) -> None:
    prompts = load_prompts(task)
    assert len(prompts) >= least
    assert len({prompt.source for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.source.startswith(prefix)
        assert len(prompt.source) > len(prefix) + 20
        assert prompt.reference.strip()


def test_a_limit_keeps_the_first() -> None:
    assert load_prompts("debian_ende", 3) == load_prompts("debian_ende")[:3]


def test_an_unknown_task_lists_the_names() -> None:
    with pytest.raises(ValueError) as error:
        load_prompts("wmt_ende")
    assert "'wmt_ende'" in str(error.value)
    assert all(name in str(error.value) for name in PREFIXES)


def test_no_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        load_prompts("debian_ende", 0)
