"""Special tokens and generation settings of Hugging Face folders."""

import pathlib
from collections.abc import Iterator
from typing import Any

from speculative.checkpoints.checkpoint import CONFIG
from speculative.disk import read_json, reading, text
from speculative.special_tokens import AddedToken, SpecialTokens, added_token, token_id
from speculative.types import EOS_ID, PAD_ID, Fields
from speculative.vocabulary import Vocabulary

GENERATION, ADDED = "generation_config.json", "added_tokens.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
MAP = "special_tokens_map.json"  # Older versions wrote it as well as the configuration.
# The pieces that a T5's texts may spell out, by their names in a tokenizer's configuration.
SPELLED = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
ADDITIONAL = "additional_special_tokens", "extra_special_tokens"

_SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
# Generation settings that change outputs, with the values that change nothing, and the option that
# does the same here.
_APPLIED_THERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "do_sample": ((False,), "--temperature 1"),
    **{name: ((value,), f"--{name}") for name, value in _SAMPLED.items()},
    "max_length": ((20,), "--max_length"),
    "max_new_tokens": ((), "--max_length"),
    "stop_strings": ((), "--stop"),
    "repetition_penalty": ((1.0,), "RepetitionPenalty of speculative.processors"),
    "num_beams": ((1,), ""),
    "num_beam_groups": ((1,), ""),
    "penalty_alpha": ((0.0,), ""),
    **dict.fromkeys(
        ("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), ((0,), "")
    ),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p"), ((1.0,), "")),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), ((0.0,), "")),
    **dict.fromkeys(
        (
            *("min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"),
            *("begin_suppress_tokens", "bad_words_ids", "force_words_ids", "constraints"),
            *("sequence_bias", "exponential_decay_length_penalty", "guidance_scale"),
            *("dola_layers", "watermarking_config", "top_h", "prompt_lookup_num_tokens"),
        ),
        ((), ""),
    ),
}


def read(folder: pathlib.Path, settings: Fields, encoder: bool) -> tuple[SpecialTokens, str]:
    """A folder's special tokens, and a sentence about generation settings that are not applied.

    `settings` are those of its `config.json`. As in transformers, `generation_config.json` takes
    precedence; if it is a copy of them that no longer agrees, the end tokens of both end a text.

    Raises ValueError if the two, or two files about added tokens, contradict each other, or if an
    id is not valid.
    """
    generation = read_json(path) if (path := folder / GENERATION).is_file() else {}
    sources = [(folder / GENERATION, generation), (folder / CONFIG, settings)]
    ends = _ids(sources, "eos_token_id")
    if encoder:
        start = _ids(sources, "decoder_start_token_id") or _ids(sources, "bos_token_id")
        start = start or _ids(sources, "pad_token_id")
    else:  # It precedes only an empty prompt, and may be transformers' default.
        start = tuple(i for i in _ids(sources, "bos_token_id") if i < settings["vocab_size"])
    pad = _ids(sources, "pad_token_id")
    tokenizer = dict(read_json(path)) if (path := folder / MAP).is_file() else {}
    tokenizer |= read_json(path) if (path := folder / TOKENIZER_CONFIG).is_file() else {}
    named = {name: _spelling(tokenizer.get(name)) for name in SPELLED}
    padding = named["pad_token"] or SPELLED["pad_token"]
    added = _added(folder, tokenizer)
    # Padding that the tokenizer adds has no row: it is neither read nor written.
    rows = settings["vocab_size"]
    added = [one for one in added if one.content != padding or one.id < rows]
    spelled = [named[name] or usual for name, usual in SPELLED.items()]
    added = [one._replace(special=one.special or one.content in spelled) for one in added]
    for name in ADDITIONAL:
        spelled += filter(None, map(_spelling, tokenizer.get(name) or ()))
    special = SpecialTokens(
        ends,
        next(iter(start), None),
        next(iter(pad), None),
        named["eos_token"],
        padding if encoder else named["pad_token"],
        tuple(added),
        tuple(dict.fromkeys(spelled)),
        _spelling(tokenizer.get("bos_token")),
        _template(folder, tokenizer),
    )
    note = _not_applied(folder, {**settings, **generation})
    each = [_ids([source, (folder, {})], "eos_token_id") for source in sources]
    if all(each) and {*each[0]}.isdisjoint(each[1]):
        note = (
            f"{folder / GENERATION} is a copy of {CONFIG} with another eos_token_id; each of them "
            f"ends a text: {', '.join(map(str, ends))}. {note}".strip()
        )
    return special, note


def written(
    special: SpecialTokens, vocabulary: Vocabulary | None, encoder: bool
) -> tuple[Fields, Fields]:
    """The entries of `config.json` and `tokenizer_config.json` for these tokens."""
    ends, start = special.eos_ids, special.start_id
    if vocabulary is not None:
        ends, start = vocabulary.eos_ids, vocabulary.start_id
    elif encoder:
        ends, start = ends or (EOS_ID,), PAD_ID if start is None else start
    ids: dict[str, Any] = {}
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    if start is not None:
        ids["decoder_start_token_id" if encoder else "bos_token_id"] = start
    if encoder or special.pad_id is not None:
        ids["pad_token_id"] = PAD_ID if special.pad_id is None else special.pad_id
    tokenizer: dict[str, Any] = {}
    if special.end is not None:
        tokenizer["eos_token"] = special.end
    if special.pad is not None:
        tokenizer["pad_token"] = special.pad
    if special.begin is not None:
        tokenizer["bos_token"] = special.begin
    if special.template is not None:
        tokenizer["chat_template"] = special.template
    usual = {*SPELLED.values(), special.end, special.pad}
    more = [one for one in special.spelled if one not in usual and "<extra_id_" not in one]
    if more:
        tokenizer[ADDITIONAL[0]] = more
    if special.added:
        tokenizer["added_tokens_decoder"] = {
            str(one.id): {k: v for k, v in one._asdict().items() if k != "id"}
            | {"normalized": False}
            for one in special.added
        }
    return ids, tokenizer


def _template(folder: pathlib.Path, tokenizer: Fields) -> str | None:
    """The chat template: a file's, or else the default one in the tokenizer's configuration."""
    if (path := folder / TEMPLATE).is_file():
        return text(path)
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        with reading(folder / TOKENIZER_CONFIG, "lists chat templates badly"):
            named = {one["name"]: one["template"] for one in template}
            template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) and template else None


def _ids(sources: list[tuple[pathlib.Path, Fields]], name: str) -> tuple[int, ...]:
    """The tokens that the files name, preferring the first file; ValueError if they disagree."""
    by_file: list[tuple[int, ...]] = []
    for path, fields in sources:
        value = fields.get(name)
        with reading(path):
            listed = value if isinstance(value, list) else [] if value is None else [value]
            if name == "pad_token_id":  # Some files have -1 for none.
                listed = [one for one in listed if one != -1]
            by_file.append(tuple(dict.fromkeys(token_id(f"{name} of {path}", i) for i in listed)))
    first, second = by_file
    if name == "pad_token_id" or not (first and second) or {*first} & {*second}:
        return first or second
    (generation, fields), (config, _) = sources
    if not fields.get("_from_model_config"):
        both = " and ".join(
            f"{', '.join(map(str, ids))} in {path}"
            for path, ids in ((generation, first), (config, second))
        )
        raise ValueError(f"The {name} is {both}, which contradict each other; correct one of them.")
    return (*second, *first) if name == "eos_token_id" else first


def _spelling(value: object) -> str | None:
    """A token's text, given as a string or as an object with its flags."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None


def _added(folder: pathlib.Path, tokenizer: Fields) -> list[AddedToken]:
    """The added tokens of all files; raises ValueError if two contradict each other."""
    by_text: dict[str, tuple[AddedToken, pathlib.Path]] = {}
    by_id: dict[int, tuple[AddedToken, pathlib.Path]] = {}
    for path, token in _listed(folder, tokenizer):
        for known, key in ((by_text, token.content), (by_id, token.id)):
            before, where = known.setdefault(key, (token, path))  # pyright: ignore
            if (before.content, before.id) != (token.content, token.id):
                raise ValueError(
                    f"The added token {before.content!r} has the id {before.id} in {where}, but "
                    f"{path} has {token.content!r} with {token.id}; correct one of them."
                )
    return [token for token, _ in by_text.values()]


def _listed(folder: pathlib.Path, tokenizer: Fields) -> Iterator[tuple[pathlib.Path, AddedToken]]:
    """Added tokens, with the files that list them: those with flags come first."""
    path = folder / TOKENIZER_CONFIG
    with reading(path, "lists added tokens badly"):
        for number, fields in (tokenizer.get("added_tokens_decoder") or {}).items():
            yield path, added_token(int(number), fields)
    path = folder / TOKENIZER
    if path.is_file():
        with reading(path, "lists added tokens badly"):
            for fields in read_json(path).get("added_tokens") or ():
                yield path, added_token(fields.get("id"), fields)
    path = folder / ADDED
    if path.is_file():
        special = {_spelling(one) for name in ADDITIONAL for one in tokenizer.get(name) or ()}
        with reading(path, "lists added tokens badly"):
            for content, number in read_json(path).items():
                yield path, added_token(number, {"content": content, "special": content in special})


def _not_applied(folder: pathlib.Path, settings: Fields) -> str:
    """A sentence about settings that change transformers' outputs but not ours; empty if none."""
    ignored: list[str] = []
    for name, (nothing, option) in _APPLIED_THERE.items():
        value = settings.get(name)
        if value is None or value in nothing or value in ([], {}):
            continue
        if name in _SAMPLED and not settings.get("do_sample"):
            continue
        option = option + f" {value}" if option.startswith("--") and name != "do_sample" else option
        ignored.append(f"{name} {value}" + (f" ({option})" if option else ""))
    if not ignored:
        return ""
    place = folder / (GENERATION if (folder / GENERATION).is_file() else CONFIG)
    return f"{place} has settings that are not applied by default: {', '.join(ignored)}."
