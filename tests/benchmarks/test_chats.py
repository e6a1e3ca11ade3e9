"""The chats of the benchmark: twelve different ones a kind, which no template needs more than."""

from benchmarks import chats


def test_twelve_prompts_a_kind() -> None:
    found = chats.prompts()
    assert [*found] == ["talk", "code", "summary", "translation"]
    for texts in found.values():
        assert len({*texts}) == 12
    assert not any("summarize: " in text for text in found["summary"])
    assert not any("translate English" in text for text in found["translation"])
    for number, text in enumerate(found["code"]):
        body = text.partition("```python\n")[2].removesuffix("\n```")
        compile(body, f"prompt {number}", "exec")
