"""`generate`: decodes the user's own text and reports the speed."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from speculative import checks, disk
from speculative.commands import (
    AUTO,
    SETTINGS,
    Command,
    add_options,
    many,
    option,
    prompts,
    rows,
    whole,
)
from speculative.commands.figures import Figures, Timed, figures
from speculative.commands.prompts import Asked
from speculative.settings import Settings

if TYPE_CHECKING:
    from speculative.decoding.loop import Earlier, Step
    from speculative.loading import Resolved
    from speculative.pair import Pair, Request, Result
    from speculative.vocabulary import Vocabulary

FOREIGN = 0.1  # From this share of characters that no piece has, a warning is given.


def _add_generate(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "text", nargs="?", help="the prompt; by default lines of standard input, as they come"
    )
    known = ", ".join(prompts.KNOWN)
    text = "prompts, one per line; in .jsonl, objects with prompt and, to override options for it, "
    option(prompt, "--file FILE", text + known)
    add_options(parser, "--target", "--draft", *rows.MODELS)
    add_options(parser, "--max_length", "--source_length", "--seed", **SETTINGS)
    add = functools.partial(option, parser)
    add("--task", "put the prefix of a task before each prompt: debian_ende, debian_synopsis")
    add_options(parser, "--module", "--prefix")
    text = "guesses per step; 0 decodes with the target alone (5)"
    add("--gamma N", text, whole(0, checks.MAX_GAMMA), default=SETTINGS["gamma"])
    add_options(parser, *rows.DECODING[1:], **SETTINGS)
    text = "an output ends before this text; may be given several times"
    add("--stop TEXT", text, action="append", default=[])
    text = "run as one of N processes, on one host or several, whose devices form the mesh; start "
    text += "each with this command. On a Cloud TPU give auto; elsewhere a port of the first "
    text += "process's host, and this process's number K of N, from 0. Only the first one shows "
    text += "texts"
    add("--distributed HOST:PORT,K/N", text)
    text = "prompts are a user's chat messages, rendered by the target's own template; typed lines "
    text += "continue the chat. A line of .jsonl with messages is a chat in any case"
    parser.add_argument("--chat", action="store_true", help=text)
    add("--system TEXT", "message before a chat, which tells the model how to answer")
    several = parser.add_argument_group("many texts")
    add_options(several, "--batch_size", batch_size=1)
    option(
        several, "--samples N", "samples per prompt (1)", whole(1, checks.MAX_SAMPLES), default=1
    )
    text = "append one JSON object per text to FILE as soon as the text ends, with the numbers of "
    text += "its prompt and sample; after an interrupt, rerun to resume"
    option(several, "--output FILE", text)
    flags = {
        "--show_special": "show special tokens, such as sentinels, in texts",
        "--logprobs": "add to JSON lines the natural logarithms of the probabilities with which "
        "the target's tokens are drawn; at T = 0, those of its own distribution",
        "--compare": "decode each text without a draft too, and report how many times as long that "
        "takes",
        "--trace": "show what each step accepted, rejected and corrected (Figure 1 of the paper)",
        "--json": f"print a line {{{', '.join(many.FIELDS)}, prompt, finish_reason, seconds, "
        "settings} per text, with --compare also {tokens_autoregressive, seconds_autoregressive}",
    }
    for name, text in flags.items():
        parser.add_argument(name, action="store_true", help=text)


def _generate(options: argparse.Namespace) -> None:
    from speculative import progress, tasks

    if options.distributed is not None:
        _join(options)
    # Invalid values raise here.
    values = {name: value for name, value in vars(options).items() if name in SETTINGS}
    if options.tree == AUTO:
        values["tree"] = options.tree = _usual_tree(options, values)
    settings = Settings(**values)
    if options.logprobs and not (options.json or options.output):
        raise ValueError("--logprobs is for lines of JSON; add --json or --output.")
    several = options.batch_size > 1 or options.samples > 1 or options.output is not None
    if several and options.compare:
        raise ValueError(
            "--compare is for one text at a time; leave it, or --output, --samples and "
            "--batch_size, out."
        )
    if options.trace and (several or options.json):
        raise ValueError(
            "--trace is for texts that are shown one at a time; leave it, or --json, --output, "
            "--samples and --batch_size out."
        )
    if options.gamma == 0 and (options.trace or options.compare):
        raise ValueError("--trace and --compare are about guesses; leave --gamma 0 out.")
    rows.import_module(options)
    prefix = options.prefix or ""
    if options.task is not None and options.prefix is None:
        prefix = tasks.task(options.task).prefix
    typed, lists = prompts.typed(options), prompts.arriving(options, prefix, settings)
    if options.output is not None:
        if typed:
            raise ValueError("--output is for a --file or another program's lines, not for typing.")
        disk.writable(options.output)
        lists = iter([list(itertools.chain.from_iterable(lists))])
    begun = [] if typed else next(lists)  # Invalid input raises before loading.
    resolved, kept = _resolved(options), None
    of_pair, chats = resolved.labels, _chats(options, resolved, typed, begun)
    begun = [chats.prompt(asked) for asked in begun]
    lengths = []
    for asked in begun:
        try:
            how = asked.settings.max_length, options.source_length
            lengths.append(resolved.length(asked.text, *how))
        except ValueError as error:
            raise ValueError(f"{asked.place}: {error}" if asked.place else str(error)) from error
    _require_memory(options, resolved, begun, lengths)
    if options.chat and typed:  # Each awaits the answer to the one before.
        lists = ([asked] for listed in lists for asked in listed)
    elif not typed:
        lists = itertools.chain([begun], lists)
    if options.output is not None:  # It raises before loading if it holds other results.
        kept = many.Results(options.output, begun, of_pair, resolved.fingerprints)
    with progress.bar(options.target) as on_progress:
        on_progress("loading", 0)
        pair = resolved.load()
    # Prompts that do not fit the pair raise before they are decoded.
    requests = _requests(lists, pair, typed, chats)
    if several:
        for listed in requests:
            for asked, one in listed:
                _warn_of_script(pair.vocabulary, asked.text[len(prefix) :], one.example + 1)
            _together(pair, listed, of_pair, options, kept)
        return
    timer = Timer(pair, streams=not options.json, resumes=chats.keeps)
    if typed:  # Compile now, so that a first line of usual length is answered at once.
        (usual,) = pair.requests([prefix + "a"], settings)
        for one in (usual, usual.alone) if options.compare else (usual,):
            timer.begin(one)
        print(f"Each line is a prompt for {options.target}; Ctrl-D ends.", file=sys.stderr)
    total = Figures()
    for asked, one in itertools.chain.from_iterable(requests):
        _warn_of_script(pair.vocabulary, asked.text[len(prefix) :], one.example + 1)
        fast = timer.decode(one, shows=True)
        chats.answered(fast.result.text)
        if not options.json:
            print(flush=True)
        compared = timer.decode(one.alone) if options.compare else None
        if options.json:
            line = many.line(asked, fast.result, of_pair) | {"seconds": round(fast.seconds, 6)}
            if compared:
                line["tokens_autoregressive"] = compared.result.tokens
                line["seconds_autoregressive"] = round(compared.seconds, 6)
            print(disk.json_line(line), flush=True)
            continue
        if options.trace:
            from speculative.reporting import tables, traces

            traces.show(traces.trace(pair, asked.text, one), options.gamma, tables.CONSOLE)
        sums = figures(pair, one, fast, compared)
        if typed:
            print(sums, file=sys.stderr)
        total += sums
    # A successful run leaves standard error empty if nobody asks or watches.
    if total.texts > (1 if typed else 0) and (options.compare or sys.stderr.isatty()):
        print(total, file=sys.stderr)


def _join(options: argparse.Namespace) -> None:
    """Joins the processes that decode together, of which the first shows the texts."""
    from speculative.backends import processes

    if options.mesh is None:
        raise ValueError("--distributed is for a mesh; add --mesh.")
    if options.text is None and options.file is None or options.output is not None:
        raise ValueError(
            "Processes that decode together need the same texts at once: give a text or a --file "
            "to each, and no --output."
        )
    if options.trace or options.compare:
        raise ValueError("--trace and --compare are for one process; leave --distributed out.")
    first = processes.join(options.distributed) == 0
    # The library that exchanges arrays between CPUs writes to standard output, kept for texts.
    sys.stdout.flush()
    sys.stdout = open(os.dup(1) if first else os.devnull, "w", encoding="utf-8")
    os.dup2(2, 1)


def _usual_tree(options: argparse.Namespace, values: dict[str, Any]) -> int:
    """The number of guesses that `--tree auto` stands for."""
    from speculative.loading import default_draft

    draft = options.draft or default_draft(options.target)
    decoding = Settings(**dict(values, tree=0)).decoding(1, ())
    return rows.usual_tree(decoding, draft, options.quantize)


def _resolved(options: argparse.Namespace) -> "Resolved":
    """The pair to load."""
    from speculative.loading import resolve

    models = options.target, options.draft, options.dtype, options.vocabulary
    names = "quantize", "quantize_draft", "mesh", "draft_mesh"
    held = {name: getattr(options, name) for name in names}
    resolved = resolve(*models, **held)
    resolved.require_trees(options.tree)
    return resolved


def _require_memory(
    options: argparse.Namespace, resolved: "Resolved", begun: Sequence[Asked], lengths: list[int]
) -> None:
    """Raises ValueError unless there is memory for prompts like these first ones."""
    from speculative.ragged import power_of_two
    from speculative.rows import memory

    longest = max([options.max_length, *(one.settings.max_length for one in begun)])
    shards = checks.shards(options.mesh, options.draft_mesh)
    of_pair = resolved.names, resolved.configs, options.gamma or 1, longest
    memory.require_text(*of_pair, max(lengths, default=0), options.tree, shards)
    if options.batch_size > 1:
        size = options.batch_size
        if options.file or options.output:  # There are no other prompts.
            size = min(size, power_of_two(len(begun) * options.samples))
        memory.require_batch(*of_pair, size, options.tree, shards)


def _chats(
    options: argparse.Namespace, resolved: "Resolved", typed: bool, begun: Sequence[Asked]
) -> prompts.Chats:
    """Renders messages as prompts, if there are any; warns of a draft with another template."""
    from speculative import chat

    if options.system is not None and not options.chat:
        raise ValueError("--system is for chats; add --chat.")
    if not options.chat and not any(asked.messages for asked in begun):
        return prompts.Chats(None, None, False)
    template = chat.template(resolved.vocabulary.special, resolved.names[0])
    of_draft = resolved.draft and resolved.draft.checkpoint and resolved.draft.checkpoint.special
    if of_draft and of_draft.template not in (None, template.source):
        print(
            f"{resolved.names[1]} has another chat template than {resolved.names[0]}, whose own is "
            "used for both; fewer of its guesses may be accepted.",
            file=sys.stderr,
        )
    return prompts.Chats(template, options.system, typed)


def _requests(
    lists: Iterator[list[Asked]], pair: "Pair", typed: bool, chats: prompts.Chats
) -> "Iterator[list[tuple[Asked, Request]]]":
    """Yields lists of prompts, each checked as a whole; a typed one that fails is skipped."""
    first = 0
    for asked in lists:
        requests: list[Request] = []
        try:
            asked = [chats.prompt(one) for one in asked]
            for number, one in enumerate(asked, first):
                numbered = dataclasses.replace(one.settings, example=number)
                requests += pair.requests([one.text], numbered)
        except ValueError as error:
            if not typed:
                place = asked[len(requests)].place
                raise ValueError(f"{place}: {error}" if place else str(error)) from error
            print(f"error: {disk.sentence(error)}", file=sys.stderr)
            continue
        yield list(zip(asked, requests, strict=True))
        first += len(asked)


def _warn_of_script(vocabulary: "Vocabulary", prompt: str, number: int) -> None:
    """Warns of a prompt that the vocabulary can only spell out."""
    if (share := vocabulary.spelled_out(prompt)) >= FOREIGN:
        print(
            f"{share:.0%} of the characters of prompt {number} are unknown pieces or single bytes "
            f"of the vocabulary {vocabulary.path.name}: the models were hardly trained on such "
            "text, so outputs may be noise.",
            file=sys.stderr,
        )


def _together(
    pair: "Pair",
    listed: "Sequence[tuple[Asked, Request]]",
    of_pair: dict[str, Any],
    options: argparse.Namespace,
    kept: many.Results | None,
) -> None:
    """Decodes prompts in batches, into a file or onto standard output in order."""
    asked, samples = [asked for asked, _ in listed], range(options.samples)
    requests = {(i, k): one.sample(k) for i, (_, one) in enumerate(listed) for k in samples}
    if kept is not None:
        lines = kept.complete(pair, requests, options.batch_size)
        print(f"Written: {options.output}, {len(lines)} texts.")
        return
    served = pair.serve(list(requests.values()), batch_size=options.batch_size)
    for (at, sample), result in zip(requests, many.in_order(served), strict=True):
        line = many.line(asked[at], result, of_pair)
        line |= {"number": listed[at][1].example, "sample": sample}
        print(disk.json_line(line) if options.json else result.text, flush=True)


@dataclasses.dataclass(frozen=True)
class Timer:
    """Decodes requests one by one and times them, including prefill but not compilation."""

    pair: "Pair"
    streams: bool  # Whether texts are shown as they grow, or decoded in one dispatch.
    resumes: bool = False  # Whether texts are turns of a chat; the target reads only new ones.
    earlier: "dict[int, Earlier]" = dataclasses.field(default_factory=dict)  # By gamma.
    known: set[Hashable] = dataclasses.field(default_factory=set)

    def begin(self, request: "Request") -> "Iterator[Step] | Result":
        """Returns the steps, the first of which has been computed, or the result.

        Programs for a new length are compiled here, with a progress bar.
        """
        import jax

        from speculative import progress
        from speculative.decoding.loop import Earlier

        programs = request.source.shape, jax.tree.structure(request.config), bool(request.stop)
        earlier = None
        if self.resumes:
            earlier = self.earlier.setdefault(request.config.gamma, Earlier())
            programs = *programs, earlier.target is None
        with contextlib.ExitStack() as stack:
            if programs not in self.known:
                bar = progress.bar("prompts of such a length")
                stack.enter_context(bar)("compiling", 0)
            if self.streams:
                steps = self.pair.steps(request, earlier)
                begun = itertools.chain([next(steps)], steps)
            else:
                begun = self.pair.answer(request)
        self.known.add(programs)
        return begun

    def decode(self, request: "Request", shows: bool = False) -> Timed:
        """Decodes a request, whose text may be shown in parts, and times it."""
        from speculative.decoding.programs import seconds_compiling

        began = time.perf_counter() - seconds_compiling()
        result = self.begin(request)
        if isinstance(result, Iterator):
            steps, shown = itertools.tee(result)
            how = request.stop, request.show_special
            for part in as_it_grows(self.pair.vocabulary, shown, *how):
                if shows:
                    print(part, end="", flush=True)
            result = self.pair.collect(steps, *how)
        return Timed(result, time.perf_counter() - seconds_compiling() - began)


def as_it_grows(
    vocabulary: "Vocabulary",
    steps: Iterable["Step"],
    stop: Sequence[str] = (),
    show_special: bool = False,
) -> Iterator[str]:
    """Yields the text of a streamed generation, in parts that later tokens do not change.

    The text ends before the first of the stop strings.
    """
    tokens: list[int] = []
    shown = text = ""
    for step in steps:
        tokens += step.tokens[0, : step.count[0]].tolist()
        if stop and (cut := vocabulary.before(stop, tokens, show_special)) is not None:
            text = cut
            break
        text = vocabulary.decode(tokens, show_special)
        # A character cut off after some of its bytes decodes to marks, which later bytes replace.
        final = text.rstrip("\N{REPLACEMENT CHARACTER}")
        # The end of the text may also be the beginning of a stop string.
        begun = (n for end in stop for n in range(1, len(end)) if final.endswith(end[:n]))
        final = final[: len(final) - max(begun, default=0)]
        yield final[len(shown) :]
        shown = final
    yield text[len(shown) :]


COMMANDS = {"generate": Command("decode your own text", _add_generate, _generate)}
