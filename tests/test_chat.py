"""Chats: what templates make of messages, as written by hand; what goes wrong with either."""

import json
import pathlib
import sys
import types
from typing import Any

import numpy as np
import pytest

import speculative
from speculative import checkpoints
from speculative.chat import Template, checked, template
from speculative.checkpoints import native
from speculative.cli import main
from speculative.special_tokens import SpecialTokens
from speculative.vocabulary import Rendered
from tests import saved

# With what templates use: trimmed blocks, loop controls, namespaces, marks of generation, filters.
SOURCE = """\
{{ bos_token }}
{%- set seen = namespace(users=0) %}
{%- for message in messages %}
    {%- if message.role == "note" %}{% continue %}{% endif %}
    {%- if message.role == "user" %}{% set seen.users = seen.users + 1 %}{% endif %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("there is no role " + message.role) }}
    {%- endif %}
    {%- generation %}[{{ message.role }}{{ seen.users }}]{{ message.content | trim }}{{ eos_token }}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "note", "content": "left out"},
    {"role": "user", "content": "Grüße <b>&</b>"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "And?"},
]
RENDERED = "<s>[system0]Be brief.</s>[user1]Grüße <b>&</b></s>[assistant1]Hi</s>[user2]And?</s>"
SPECIAL = SpecialTokens(begin="<s>", end="</s>", template=SOURCE)


def test_what_a_template_makes_of_messages() -> None:
    of_model = template(SPECIAL, "mine")
    assert of_model(MESSAGES) == RENDERED + "[assistant]"
    assert of_model(MESSAGES, goes_on=False) == RENDERED
    assert isinstance(of_model(MESSAGES), Rendered)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content | tojson }}", '"ü<"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{% for i in range(3) %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}", "01"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is defined and tools is not none }}", "False"),
    ],
)
def test_what_templates_may_call(source: str, expected: str) -> None:
    assert Template(source, "mine")([{"role": "user", "content": "ü<"}]) == expected


@pytest.mark.parametrize(
    ("source", "fragment"),
    [
        ("{{ raise_exception('roles must alternate') }}", "messages: roles must alternate. Change"),
        ("{% for i in range(10**9) %}{% endfor %}", "more than 100,000 iterations"),
        (
            "{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
            "more than 100,000 iterations",
        ),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
        ("{% if %}", "template of mine cannot be used"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
    ],
)
def test_a_template_that_fails_gets_a_sentence(source: str, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment) as raised:
        Template(source, "mine")([{"role": "user", "content": "a"}])
    assert str(raised.value).startswith("The chat template of mine cannot be used with these")


@pytest.mark.parametrize(
    ("messages", "fragment"),
    [
        ([], "must be a list of at least one"),
        ("hello", "must be a list of at least one"),
        ([{"content": "a"}], "Message 1 must be an object with role and content"),
        ([{"role": "user", "content": "a"}, "b"], "Message 2 must be an object"),
        ([{"role": "user"}], "content of message 1 must be"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of message 1 must be"),
    ],
)
def test_what_are_no_messages(messages: Any, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        checked(messages)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small random decoder-only model with a template."""
    params, special = saved.random(saved.GPT, 0), SpecialTokens(eos_ids=(1,), template=SOURCE)
    native.save(tmp_path / "chats", saved.GPT, params, saved.VOCABULARY, special=special)
    return tmp_path / "chats"


def test_every_format_keeps_the_template(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert checkpoints.open(folder).special.template == SOURCE
    theirs = checkpoints.convert(folder, tmp_path / "theirs", "huggingface")
    assert theirs.special.template == SOURCE
    path = tmp_path / "theirs" / "tokenizer_config.json"
    said = json.loads(path.read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    path.write_text(json.dumps(said | {"chat_template": named}))
    assert checkpoints.open(tmp_path / "theirs").special.template == "yes"
    (tmp_path / "theirs" / "chat_template.jinja").write_text("a file comes first\n")
    assert checkpoints.open(tmp_path / "theirs").special.template == "a file comes first\n"


def test_python_and_the_command_line_decode_the_same(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = speculative.load(folder, "copy")
    how = {"gamma": 2, "temperature": 0.0, "max_length": 12}
    messages = [{"role": "system", "content": "Brief"}, {"role": "user", "content": "Hi"}]
    expected = pair.chat(messages, **how)
    prompt = pair.rendered(messages)
    assert prompt == "[system0]Brief[user1]Hi[assistant]"
    # Nothing but what is spelled out is read: no start token before it.
    np.testing.assert_array_equal(
        pair.vocabulary.prompt(prompt), pair.vocabulary.encode(prompt)[:-1]
    )
    lines = tmp_path / "chats.jsonl"
    lines.write_text(json.dumps({"messages": messages}) + "\n")
    usual = ["--target", str(folder), "--draft", "copy", "--gamma=2", "--temperature=0"]
    usual += ["--max_length=12", "--json"]
    for given in (["--file", str(lines)], ["--chat", "--system", "Brief", "Hi"]):
        assert main(["generate", *usual, *given]) == 0
        line = json.loads(capsys.readouterr().out)
        assert (line["prompt"], line["tokens"]) == (prompt, expected.tokens)


def test_what_is_no_chat(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, fragment in (
        (["--target", "debian_lm", "--chat", "Hi"], "debian_lm has no chat template"),
        (["--target", str(folder), "--draft", "copy", "--system", "a", "Hi"], "add --chat"),
    ):
        assert main(["generate", *given]) == 2
        assert fragment in capsys.readouterr().err


def test_a_chat_on_a_terminal_goes_on(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is that to all messages so far."""
    asked, messages = ["Hi", "And what is the time?", "Why?"], list[dict[str, str]]()
    how, answers = {"gamma": 2, "temperature": 0.0, "max_length": 12}, list[str]()
    pair = speculative.load(folder, "copy")
    for text in asked:
        messages.append({"role": "user", "content": text})
        answers.append(pair.chat(messages, **how).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    lines = iter([*(f"{text}\n".encode() for text in asked), b""])
    buffer = types.SimpleNamespace(read=lambda: next(lines), read1=lambda: next(lines))
    stdin = types.SimpleNamespace(isatty=lambda: True, buffer=buffer)
    monkeypatch.setattr(sys, "stdin", stdin)
    usual = ["--target", str(folder), "--draft", "copy", "--chat", "--gamma=2"]
    assert main(["generate", *usual, "--temperature=0", "--max_length=12"]) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)
