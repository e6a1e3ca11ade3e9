"""`audit` and `verify`: test whether samples, another program's or ours, are a target's own."""

import argparse
import contextlib
import dataclasses
import json
import pathlib

from speculative.commands import SETTINGS, Command, add_options, option, rows, whole


def _add_verdict(parser: argparse.ArgumentParser) -> None:
    option(
        parser,
        "--false_alarm P",
        "probability of a false alarm (0.001)",
        _false_alarm,
        default=0.001,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with every test")


def _false_alarm(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"must lie in (0, 1), not {text!r}")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    text = "beginnings of outputs sampled per prompt (1024)"
    option(parser, "--samples", text, whole(1, 10**6), default=1024)
    _add_verdict(parser)


def _verify(options: argparse.Namespace) -> int:
    from speculative.studies import sweep

    config = rows.row(options)[1]
    result = sweep.verify(config, options.samples, options.false_alarm)
    print(json.dumps(result.fields()) if options.json else result.verdict())
    return 0 if result.passed else 1


def _add_audit(parser: argparse.ArgumentParser) -> None:
    option(
        parser,
        "--samples FILE",
        "one JSON object per line, as printed by generate --json: prompt or prompt_tokens, tokens "
        "and, if known, logprobs",
        required=True,
    )
    add_options(parser, "--target", "--draft", "--vocabulary", "--dtype", "--quantize", "--mesh")
    add_options(parser, *rows.SAMPLING, **SETTINGS | {"temperature": 1.0})
    add_options(parser, "--max_length", "--seed")
    _add_verdict(parser)
    faulty = parser.add_argument_group(
        "power", "Samples that pass are compared with those of faulty decoders, simulated here."
    )
    faulty.add_argument("--power", action="store_true", help="show which faults they would reveal")
    add_options(faulty, "--gamma", gamma=5)


def _audit(options: argparse.Namespace) -> int:
    from speculative import loading, progress
    from speculative.decoding import Decoding
    from speculative.reporting import tables
    from speculative.sampling import Sampling
    from speculative.studies import audit
    from speculative.studies.power import powers
    from speculative.studies.samples import read

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    own = loading.DRAFTS.get(options.target, "uniform")
    draft = own if options.draft is None else options.draft
    models = options.target, draft, options.dtype, options.vocabulary
    resolved = loading.resolve(*models, quantize=options.quantize, mesh=options.mesh)
    vocabulary = resolved.vocabulary
    decoder_only = loading.model_of(resolved.target.config).decoder_only
    limits = options.gamma, options.max_length, vocabulary.eos_ids
    config = Decoding(vocabulary.size, sampling, *limits)
    encode = vocabulary.prompt if decoder_only else vocabulary.encode
    samples = read(pathlib.Path(options.samples), encode, config)
    audit.require_enough(samples, sampling)
    seed = options.seed or 0
    with progress.bar(options.target) as on_progress:
        on_progress("loading", 0)
        pair = resolved.load()
        result = audit.audit(pair, samples, sampling, options.false_alarm, on_progress, seed)
        testable, power = result.passed and not sampling.greedy, []
        if testable and options.power:
            power = powers(pair, samples, result, config, on_progress=on_progress, seed=seed)
    if options.json:
        print(json.dumps(result.fields() | {"power": [dataclasses.asdict(one) for one in power]}))
    else:
        print(result.verdict())
        if power:
            tables.show_power(power, pair.names[1], options.gamma)
        elif testable:
            print("--power shows which faults such samples would reveal.")
    return 0 if result.passed else 1


COMMANDS = {
    "verify": Command("test that a pair's outputs on a task are exact", _add_verify, _verify),
    "audit": Command("test any program's samples against a target", _add_audit, _audit),
}
