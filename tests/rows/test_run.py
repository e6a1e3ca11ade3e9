"""A measured row: its numbers against other ways to the same numbers, on a tiny pair."""

import dataclasses
import itertools
import json
import math
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speculative
from speculative import Pair
from speculative.decoding import Decoding, Output, Params, Token
from speculative.decoding.rules import Block
from speculative.measurement import quality
from speculative.measurement.alpha import alpha_on_target_text
from speculative.measurement.blocks import tokens_on_target_text
from speculative.measurement.exactness import Difference
from speculative.measurement.timing import Costs
from speculative.models import model_of
from speculative.rows import workload
from speculative.rows.config import RowConfig, paper_numbers
from speculative.rows.kept import Example, KeptExamples
from speculative.rows.records import Record
from speculative.rows.run import run_row
from speculative.studies.tune import Tuning
from speculative.tasks.prompts import Prompt
from tests.rows import made

PROMPTS = [
    Prompt("summarize: a library for reading old files", "library for old files"),
    Prompt("summarize: draws maps of the night sky", "maps of the sky"),
    Prompt("summarize: plays sounds when mail comes in", "mail notifier with sounds"),
]
LENGTH = 12
VERIFY = {2: 2.4, 3: 2.5, 4: 2.6, 5: 2.7, 7: 3.0}
COSTS = Costs(8.0, 2.0, 2.0, VERIFY, {2: 0.5, 3: 0.7, 4: 0.9, 5: 1.1, 7: 1.5})
"""Milliseconds that a measurement is told to have found."""


def config(temperature: float = 0.0, **changes: Any) -> RowConfig:
    fields: dict[str, Any] = {
        "task": "debian_ende",
        "target": "the_target",
        "draft": "the_draft",
        "temperature": temperature,
        "max_length": LENGTH,
        "rounds": 1,
    }
    return RowConfig(**(fields | changes))


def decoding(pair: Pair, asked: RowConfig) -> Decoding:
    vocabulary = pair.vocabulary
    given = {"max_length": LENGTH, "eos_ids": vocabulary.eos_ids}
    return Decoding(vocabulary.size, asked.sampling, **given)


@pytest.fixture(scope="module")
def pair(saved_pair: tuple[pathlib.Path, pathlib.Path]) -> Pair:
    target, draft = saved_pair
    return speculative.load(str(target), str(draft))


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Gives `COSTS` for the gammas asked for, which it notes; the loops have tests of their own."""
    return made.no_timing(monkeypatch, COSTS)


class Row(NamedTuple):
    """What was measured."""

    record: Record
    examples: list[Example]


def measured(pair: Pair, config: RowConfig, prompts: list[Prompt] | None, **more: Any) -> Row:
    kept = KeptExamples()
    return Row(run_row(pair, config, prompts, kept=kept, **more), list(kept))


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_with_trees(pair: Pair, temperature: float, no_timing: list[Any]) -> None:
    """Counts by depth and by rank are those of the texts; Equation 1 is a chain's."""
    given = {"tree": 15, "gamma": 4, "verification": "coupled" if temperature else "token"}
    r, examples = measured(pair, config(temperature, **given), PROMPTS)
    results = pair.generate(
        [prompt.source for prompt in PROMPTS], temperature=temperature, max_length=LENGTH, **given
    )
    assert [example.speculative for example in examples] == [one.text for one in results]
    assert [example.autoregressive for example in examples] == [one.text for one in results]
    by_rank = np.sum([np.array(one.accepted_by_rank) for one in results], axis=0)
    tested = np.sum([one.tested_by_position for one in results])
    assert r.accepted_by_rank == by_rank.tolist() and by_rank.shape == (4, 8)
    assert (r.tree, r.gamma, r.nodes) == (15, 4, 15.0)
    assert r.alpha == pytest.approx(by_rank[:, 0].sum() / tested)
    assert r.alpha_accepted == pytest.approx(by_rank.sum() / tested)
    assert r.tokens_per_call_predicted == pytest.approx(1 + by_rank.sum() / r.num_target_calls)
    assert r.tokens_per_call_expected is r.speedup_expected is r.speedup_long is None
    assert r.speedup_predicted > 0
    json.loads(json.dumps(dataclasses.asdict(r), allow_nan=False))


def check_consistent(r: Record) -> None:
    """Fields that follow from other fields, by the formulas as the paper prints them."""
    a, g = r.alpha, r.gamma
    equation_1 = (1 - a ** (g + 1)) / (1 - a) if a < 1 else g + 1
    assert r.tokens_per_call == pytest.approx(r.num_tokens / r.num_target_calls)
    assert r.tokens_per_call_expected == pytest.approx(equation_1)
    assert r.tokens_per_call_predicted == pytest.approx(equation_1)
    assert r.speedup_expected == pytest.approx(equation_1 / (g * r.c + 1))
    assert r.speedup_long == pytest.approx(equation_1 / (g * r.c + r.verify_cost))
    assert r.c == pytest.approx(r.ms_draft_step / r.ms_target_step)
    assert r.verify_cost == pytest.approx(r.ms_verify / r.ms_target_step)
    assert r.alpha_accepted == pytest.approx(r.accepted / r.tested)
    ratio = r.ms_per_token_autoregressive / r.ms_per_token_speculative
    assert r.speedup == pytest.approx(ratio)
    assert r.speedup_low <= r.speedup <= r.speedup_high
    assert r.alpha_low <= r.alpha <= r.alpha_high
    accepted = (r.alpha_accepted_low, r.alpha_accepted, r.alpha_accepted_high)
    assert list(accepted) == sorted(value for value in accepted if value is not None)
    # An output that is cut may end with a guess; all others end with the target's own token.
    assert 0 <= r.accepted + r.num_target_calls - r.num_tokens <= r.num_examples
    json.loads(json.dumps(dataclasses.asdict(r), allow_nan=False))


@pytest.mark.usefixtures("no_timing")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_a_draft_that_knows_nothing(pair: Pair, temperature: float) -> None:
    asked = config(temperature, task="debian_synopsis", gamma=2, seed=7, paper_draft="small")
    row = measured(pair, asked, PROMPTS)
    check_consistent(row.record)
    r = row.record
    assert (r.gamma, r.num_examples, r.batch_size, r.seed) == (2, 3, 1, 7)
    assert (r.target, r.draft) == ("the_target", "the_draft")
    assert r.metric == "rougeL"
    assert r.dtype == "float32"
    # Two embeddings of 8,200 by 8 are nearly all of the draft, and no number is left out.
    assert r.draft_parameters and r.draft_bytes
    assert 2 * 8200 * 8 < r.draft_parameters < 2 * 8200 * 8 + 2000
    assert r.draft_parameters <= r.draft_bytes < 8 * r.draft_parameters
    assert r.draft_training_minutes is None
    assert r.jax_version == jax.__version__
    assert r.paper_alpha == (0.65 if temperature == 0 else 0.53)
    assert r.simulated_alpha is None
    settings = dict(line.split(" = ", 1) for line in r.gin.splitlines())
    assert (settings["RowConfig.gamma"], settings["RowConfig.max_length"]) == ("2", "12")

    calls = 0
    for number, (prompt, found) in enumerate(zip(PROMPTS, row.examples, strict=True)):
        same: dict[str, Any] = {
            "seed": 7,
            "example": number,
            "temperature": temperature,
            "max_length": LENGTH,
        }
        guessed = pair.generate(prompt.source, gamma=2, **same)
        assert found.speculative == guessed.text
        assert found.autoregressive == pair.generate(prompt.source, gamma=0, **same).text
        assert (found.source, found.reference) == (prompt.source, prompt.reference)
        calls += guessed.target_calls
    assert r.num_target_calls == calls
    if temperature == 0:
        assert (r.outputs_identical, r.near_ties) == (3, 0)
    else:
        assert (r.outputs_identical, r.near_ties) == (None, None)
        assert 0 < r.alpha < 1


@pytest.mark.usefixtures("no_timing")
def test_a_row_of_blocks(pair: Pair) -> None:
    """What is predicted comes from blocks, and acceptance by position from the steps themselves."""
    asked = config(1.0, gamma=4, verification="block", seed=3)
    r = run_row(pair, asked, PROMPTS)
    shared: dict[str, Any] = {"temperature": 1.0, "max_length": LENGTH, "seed": 3}
    blocks = [
        tokens_on_target_text(
            pair, pair.encode(prompt.source),
            pair.generate(prompt.source, example=number, gamma=0, **shared).tokens,
            decoding(pair, asked), (4,), (Block(), Token()), 3 + number,
        )
        for number, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    predicted, by_token = np.concatenate(blocks).mean(axis=(0, 1))
    assert r.gain_over_token == pytest.approx(predicted / by_token)
    assert r.tokens_per_call_predicted == pytest.approx(predicted)
    assert r.tokens_per_call_predicted != pytest.approx(r.tokens_per_call_expected, rel=1e-4)
    assert r.speedup_long == pytest.approx(predicted / (4 * r.c + r.verify_cost))
    tested, accepted, lengths = ([0] * 5 for _ in range(3))
    for number, prompt in enumerate(PROMPTS):
        given = shared | {"gamma": 4, "verification": "block", "example": number}
        for step in pair.stream(prompt.source, **given):
            count, guessed = int(step.count[0]), int(step.accepted[0])
            for i in range(4):
                tested[i] += i < count and i <= guessed
                accepted[i] += i < count and i < guessed
            lengths[min(guessed, count)] += 1
    assert (r.tested_by_position, r.accepted_by_position) == (tested[:4], accepted[:4])
    assert r.accepted_lengths == lengths
    assert (r.tested, r.accepted) == (sum(tested), sum(accepted))
    assert r.draft_tokens == 4 * r.num_target_calls
    json.loads(json.dumps(dataclasses.asdict(r), allow_nan=False))


@pytest.mark.usefixtures("no_timing")
def test_only_near_ties_count_as_such(pair: Pair) -> None:
    """Of four greedy texts one is equal, two differ by rounding, one by more than that."""
    found = [None, *(Difference(1, 4, 5, x, 1e-4) for x in (1e-5, 0.7, 5e-5))]
    kept = KeptExamples()
    for number, difference in enumerate(found):
        kept.add(made.example(difference, number))
    prompts = [*PROMPTS, PROMPTS[0]]
    record = run_row(pair, config(gamma=2), prompts, kept=kept)
    assert (record.num_examples, record.outputs_identical, record.near_ties) == (4, 1, 2)


@pytest.mark.usefixtures("no_timing")
@pytest.mark.parametrize(("dtype", "coarse"), [("float32", False), ("bfloat16", True)])
def test_a_difference_is_judged_by_the_dtype_of_the_products(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, dtype: str, coarse: bool
) -> None:
    decode, target = Pair.run, model_of(pair.target.config.replace(dtype=dtype))
    pair = dataclasses.replace(pair, target=target)

    def wrong(self: Pair, source: jax.Array, draws: jax.Array, decoding: Any) -> Output:
        output = decode(self, source, draws, decoding)
        wrong = output.tokens.at[:, 1].add(1 if decoding.gamma else 0)
        return dataclasses.replace(output, tokens=wrong)

    monkeypatch.setattr(Pair, "run", wrong)
    (example,) = measured(pair, config(gamma=2), PROMPTS[:1]).examples
    difference = example.difference
    assert difference is not None
    assert difference.position == 1
    assert (difference.tolerance > 1e-3) == coarse


@pytest.mark.usefixtures("no_timing")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lenient_row(pair: Pair, temperature: float) -> None:
    """More guesses stand than of the exact row, the baseline is the same, exactness no claim."""
    asked = config(temperature, gamma=2, paper_draft="small")
    exact = measured(pair, asked, PROMPTS)
    row = measured(pair, dataclasses.replace(asked, lenience=0.3), PROMPTS)
    check_consistent(row.record)
    r = row.record
    assert (r.lenience, exact.record.lenience) == (0.3, 1.0)
    assert (r.outputs_identical, r.near_ties) == (None, None)
    assert [example.difference for example in row.examples] == [None] * 3
    assert r.alpha > exact.record.alpha
    assert r.accepted > exact.record.accepted
    assert (r.paper_alpha, r.paper_speedup) == ((0.80, 3.9) if temperature == 0 else (0.76, 3.6))
    apart = 0
    for prompt, one, other in zip(PROMPTS, row.examples, exact.examples, strict=True):
        assert one.autoregressive == other.autoregressive
        same: dict[str, Any] = {
            "example": one.number,
            "temperature": temperature,
            "max_length": LENGTH,
        }
        result = pair.generate(prompt.source, gamma=2, lenience=0.3, **same)
        assert one.speculative == result.text
        # Alpha is of the target's own text, not of the lenient one.
        alone = pair.generate(prompt.source, gamma=0, **same).tokens
        apart += alone != result.tokens
        how = dataclasses.replace(decoding(pair, asked), rule=Token(0.3))
        (betas,) = alpha_on_target_text(pair, [pair.encode(prompt.source)], [alone], how)
        np.testing.assert_allclose(one.betas, betas, atol=1e-5)
    assert apart


@pytest.mark.usefixtures("no_timing")
def test_above_temperature_0_each_round_draws_another_sample(pair: Pair) -> None:
    """They are `Pair.samples`; a row sums them up, and resamples texts with all of theirs."""
    settings: dict[str, Any] = {"temperature": 1.0, "max_length": LENGTH, "seed": 5}
    # References that one of each text's outputs equals, so that there is something to score.
    said = [
        pair.samples(p.source, 2, example=i, gamma=0, **settings) for i, p in enumerate(PROMPTS)
    ]
    prompts = [Prompt(p.source, both[1].text) for p, both in zip(PROMPTS, said, strict=True)]
    row = measured(pair, config(1.0, gamma=2, rounds=3, seed=5), prompts)
    r = row.record
    places = [(example.number, example.sample) for example in row.examples]
    assert places == list(itertools.product(range(3), range(3)))
    calls = tokens = 0
    for number, prompt in enumerate(PROMPTS):
        found = [example for example in row.examples if example.number == number]
        for gamma in (0, 2):
            samples = pair.samples(prompt.source, 3, example=number, gamma=gamma, **settings)
            texts = [one.speculative if gamma else one.autoregressive for one in found]
            assert texts == [sample.text for sample in samples]
        assert len({one.speculative for one in found}) > 1
        calls += sum(sample.target_calls for sample in samples)
        tokens += sum(len(sample.tokens) for sample in samples)
        assert [len(one.betas) > 0 for one in found] == [True, False, False]
    assert (r.num_examples, r.num_target_calls, r.num_tokens) == (3, calls, tokens)

    def speedup(numbers: list[int]) -> float:
        of = [example for number in numbers for example in row.examples if example.number == number]
        alone, guessed = (
            sum(one.seconds[way] for one in of) / sum(one.lengths[way] for one in of)
            for way in (0, 1)
        )
        return alone / guessed

    assert r.speedup == pytest.approx(speedup([0, 1, 2]))
    draws = np.random.default_rng(5)
    resampled = [speedup(draws.integers(0, 3, 3).tolist()) for _ in range(2000)]
    interval = pytest.approx(np.percentile(resampled, [2.5, 97.5]))
    assert (r.speedup_low, r.speedup_high) == interval
    references = [example.reference for example in row.examples]
    both = [[e.autoregressive for e in row.examples], [e.speculative for e in row.examples]]
    scores = [quality.measure("bleu", references, texts) for texts in both]
    assert [r.quality_autoregressive, r.quality_speculative] == scores
    numbers = [example.number for example in row.examples]
    found = quality.difference("bleu", references, both[0], both[1], 5, numbers)
    assert (r.quality_difference, r.quality_difference_low, r.quality_difference_high) == found
    assert found[0] == pytest.approx(scores[1] - scores[0])
    assert (
        found[1:]
        != quality.difference("bleu", references, both[0], both[1], 5, range(len(numbers)))[1:]
    )


def test_a_row_of_a_draft_that_is_the_target(pair: Pair, no_timing: list[tuple[int, ...]]) -> None:
    """Every guess stands: alpha is 1, a call yields gamma + 1, and the prediction says so."""
    draft = dataclasses.replace(pair.draft, model=pair.target)  # pyright: ignore
    params = Params(pair.params.target, pair.params.target)
    same = dataclasses.replace(pair, draft=draft, params=params)
    heard: list[tuple[str, float]] = []
    r = run_row(
        same, config(gamma=7, max_length=16), PROMPTS, on_progress=lambda *said: heard.append(said)
    )
    check_consistent(r)
    assert no_timing == [(7,)]
    assert r.alpha == r.alpha_accepted == 1
    assert r.num_target_calls == 3 * 2
    assert r.metric == "bleu"
    # 16 tokens take 2 calls, each 1.5 ms of guesses and 3 ms of verification.
    predicted = (8 + 16 * 2) / (8 + 2 + 2 * (1.5 + 3.0))
    assert r.speedup_predicted == pytest.approx(predicted)
    # Work is announced before it is done, so that no bar stands at its end.
    decoding = [("decoding", number / 3) for number in range(3)]
    assert heard == [("compiling", 0), *decoding, ("resampling", 0)]


def test_costs_are_those_of_a_typical_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source of the mean length, and a cache, which grows, of the median output."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(workload, "timed_calls", lambda *settings: given.append(settings) or {})
    prompts = [Prompt("summarize: maps", ""), *PROMPTS]
    work = workload.workload(pair, config(max_length=200), prompts)
    work.meter((2, 5), [10, 150, 30])
    lengths = [len(pair.vocabulary.encode(prompt.source)) for prompt in prompts]
    assert len(set(lengths)) > 2
    _, _, gammas, source, cache = given[0]
    assert (gammas, cache) == ((2, 5), 64)
    assert source.shape == (1, work.sources.shape[1])
    padding = source[0] == pair.target.pad_id
    assert abs((~padding).sum() - sum(lengths) / 4) <= 0.5
    assert (jnp.diff(padding.astype(int)) >= 0).all(), "it stands after the tokens"


def test_the_clock_measures_whole_generations(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, no_timing: list[tuple[int, ...]]
) -> None:
    """A generation takes 30 ms plainly and 10 ms speculatively by this clock; one round is slow."""
    now = 0.0
    timed: list[int] = []
    decode = Pair.run

    def slow(self: Pair, source: jax.Array, draws: jax.Array, decoding: Any) -> Output:
        nonlocal now
        timed.append(decoding.gamma)
        # Three autoregressive calls and another compile; of an example's rounds the second is slow.
        before = timed.count(decoding.gamma) - (1 if decoding.gamma else 3)
        late = before % 3 == 2
        now += (0.01 if decoding.gamma else 0.03) * (5 if late else 1)
        return decode(self, source, draws, decoding)

    monkeypatch.setattr(Pair, "run", slow)
    monkeypatch.setattr(workload.time, "perf_counter", lambda: now)
    row = measured(pair, config(gamma=2, rounds=3), PROMPTS)
    tokens = row.record.num_tokens
    assert row.record.ms_per_token_autoregressive == pytest.approx(3 * 30 / tokens)
    assert row.record.ms_per_token_speculative == pytest.approx(3 * 10 / tokens)
    assert row.record.speedup == pytest.approx(3.0)
    # Both ways of an example take turns in going first.
    assert timed[4:] == [0, 2, 2, 0, 0, 2, 2, 0, 0, 2, 2, 0, 0, 2, 2, 0, 0, 2]
    assert no_timing == [(2,)]


@pytest.mark.usefixtures("no_timing")
def test_a_row_goes_on_where_it_stopped(pair: Pair, tmp_path: pathlib.Path) -> None:
    asked = config(1.0, gamma=2, rounds=2)
    whole = measured(pair, asked, PROMPTS)

    class Killed(BaseException):
        pass

    def kill(what: str, share: float) -> None:
        if what == "decoding" and share > 0.5:
            raise Killed

    with pytest.raises(Killed):
        run_row(pair, asked, PROMPTS, "row", KeptExamples(tmp_path, asked.gin()), kill)
    lines = (tmp_path / "examples.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 2
    run_row(pair, asked, PROMPTS, "row", KeptExamples(tmp_path, asked.gin()))
    assert (tmp_path / "examples.jsonl").read_text().splitlines()[:4] == lines
    # A kill between two samples of a text; and a line of before there were samples.
    lines = (tmp_path / "examples.jsonl").read_text().splitlines()
    older = {name: value for name, value in json.loads(lines[0]).items() if name != "sample"}
    (tmp_path / "examples.jsonl").write_text("\n".join([json.dumps(older), *lines[1:3]]) + "\n")
    kept = KeptExamples(tmp_path, asked.gin())
    again = run_row(pair, asked, PROMPTS, "row", kept)
    assert (tmp_path / "examples.jsonl").read_text().splitlines()[1:3] == lines[1:3]
    assert again.alpha == whole.record.alpha
    assert again.num_target_calls == whole.record.num_target_calls
    for one, other in zip(whole.examples, kept, strict=True):
        assert dataclasses.replace(one, seconds=other.seconds) == other


@pytest.mark.usefixtures("no_timing")
def test_alpha_is_measured_on_so_many_tokens_alone(pair: Pair) -> None:
    row = measured(pair, config(1.0, gamma=2, alpha_tokens=LENGTH + 1), PROMPTS)
    assert [len(example.betas) > 0 for example in row.examples] == [True, True, False]
    betas = np.concatenate([example.betas for example in row.examples])
    assert row.record.alpha == pytest.approx(betas.mean())


@pytest.mark.usefixtures("no_timing")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_simulated_acceptance(pair: Pair, temperature: float) -> None:
    """Guesses stand with the chance that was asked for, whatever the models say."""
    asked = config(
        temperature, gamma=3, max_length=60, simulated_alpha=0.7, num_examples=20, source_length=9
    )
    r = run_row(pair, asked, None)
    assert (r.alpha, r.simulated_alpha, r.num_tokens) == (0.7, 0.7, 20 * 60)
    assert (r.metric, r.outputs_identical) == (None, None)
    # Of 20 texts of 60 tokens; four standard deviations of Eq. 1's mean are 0.3.
    expected = (1 - 0.7**4) / 0.3
    assert r.tokens_per_call == pytest.approx(expected, abs=0.3)
    assert r.alpha_accepted == pytest.approx(0.7, abs=0.07)


def test_a_whole_row_with_its_costs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock at which all that is timed takes one second: 32 steps as well as a prefill."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    r = run_row(pair, config(gamma=2), PROMPTS[:1])
    check_consistent(r)
    assert (r.ms_prefill, r.ms_prefill_draft) == pytest.approx((1000, 1000))
    assert (r.ms_target_step, r.ms_verify, r.ms_draft_step) == pytest.approx((31.25, 31.25, 0))
    assert r.ms_per_token_autoregressive == pytest.approx(1000 / r.num_tokens)
    assert r.speedup == pytest.approx(1)


@pytest.mark.parametrize(
    ("alpha", "lengths", "gamma"),
    [(0.1, [200], 2), (0.6, [200], 3), (0.82, [200], 5), (0.95, [200], 7), (0.95, [3], 2)],
)
def test_gamma_is_the_best_for_such_texts(alpha: float, lengths: list[int], gamma: int) -> None:
    """By simulation of Algorithm 1 with a coin for each guess."""
    rng = np.random.default_rng(3)
    times = {}
    for candidate in COSTS.ms_verify:
        held, calls = np.zeros(20_000, int), 0
        while (held < lengths[0]).any():
            calls += int((held < lengths[0]).sum())
            stand = rng.random((len(held), candidate)) < alpha
            held += np.cumprod(stand, axis=1).sum(axis=1) + 1
        times[candidate] = calls * (COSTS.ms_verify[candidate] + COSTS.ms_proposal[candidate])
    found = Tuning(alpha, lengths, COSTS)
    assert found.gamma == gamma == min(times, key=times.__getitem__)


def test_the_papers_numbers_for_a_row_of_the_same_kind() -> None:
    def numbers(experiment: str = "row", **changes: Any) -> tuple[float | None, float | None]:
        fields: dict[str, Any] = {"paper_draft": "small"}
        return paper_numbers(config(**(fields | changes)), experiment)

    assert numbers() == (0.75, 3.4)
    assert numbers(temperature=1.0) == (0.62, 2.6)
    assert numbers(task="debian_synopsis") == (0.65, 3.1)
    assert numbers(task="wmt_t2t_ende_v003") == (0.75, 3.4)
    assert numbers(paper_draft="bigram") == (0.20, None)
    assert numbers(paper_draft=None) == (None, None)
    assert numbers(temperature=0.5) == (None, None)
    assert numbers(temperature=1.0, top_k=9) == (None, None)
    assert numbers("table5/row") == (0.75, 3.3)
    assert numbers(lenience=0.1) == (0.87, 4.9)
    assert numbers(temperature=1.0, lenience=0.5) == (0.71, 3.1)
    assert numbers(temperature=1.0, lenience=0.5, paper_draft="bigram") == (0.23, None)
    assert numbers(lenience=0.2) == (None, None)
    assert numbers(task="debian_synopsis", lenience=0.5) == (None, None)


@pytest.mark.parametrize(
    ("gamma", "prompts", "message"),
    [
        (2, [], "at least one prompt"),
        (2, [Prompt(" ", "")], "prompt is empty"),
        (None, PROMPTS, "row has no gamma; set RowConfig.gamma"),
    ],
)
def test_what_makes_no_row(
    pair: Pair, gamma: int | None, prompts: list[Prompt], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_row(pair, config(gamma=gamma), prompts)


def test_damaged_weights_end_the_row(pair: Pair) -> None:
    broken = jax.tree.map(lambda x: jnp.full_like(x, math.nan), pair.params.target)
    damaged = dataclasses.replace(pair, params=Params(broken, pair.params.draft))
    with pytest.raises(ValueError, match=r"logits of .*target are not finite"):
        run_row(damaged, config(gamma=2, max_length=4), PROMPTS)


def test_sources_are_cut_only_where_the_row_says(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of sequence stays; how many were cut is said, and is in the row's record."""
    long = [Prompt("a library of files " * 200, ""), *PROMPTS[:1]]
    work = workload.workload(pair, config(), long)
    tokens = [pair.vocabulary.encode(prompt.source) for prompt in long]
    assert len(tokens[0]) > 512
    for found, want in zip(np.asarray(work.sources), tokens, strict=True):
        np.testing.assert_array_equal(found[: len(want)], want)
    assert (work.truncated, caplog.messages) == (0, [])
    work = workload.workload(pair, config(source_length=40), long)
    np.testing.assert_array_equal(
        np.asarray(work.sources)[0, :40], [*tokens[0][:39], tokens[0][-1]]
    )
    assert (np.asarray(work.sources)[0, 40:] == pair.target.pad_id).all()
    assert work.truncated == 1
    assert caplog.messages == ["Of 2 sources 1 are cut to 40 tokens."]
