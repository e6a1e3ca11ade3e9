"""Files and packing: nothing lost, nothing mixed, the same batch for the same step."""

import dataclasses
import pathlib

import numpy as np
import pytest

from speculative.training import data

SOURCE, TARGET = 24, 20


def some_examples(count: int, seed: int = 0) -> data.Examples:
    random = np.random.default_rng(seed)
    # Every example opens with its own number, so that its copies can be counted.
    return data.ragged(
        [np.r_[100 * seed + i + 2, random.integers(2, 99, random.integers(1, 12)), 1]
         for i in range(count)],
        [np.r_[random.integers(2, 99, random.integers(1, 9)), 1] for i in range(count)],
    )  # fmt: skip


def unpacked(batches: list[data.Batch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    pairs = []
    for batch in batches:
        for row in range(len(batch["encoder_input_tokens"])):
            segments = batch["encoder_segment_ids"][row]
            numbers = range(1, segments.max() + 1)
            assert batch["decoder_segment_ids"][row].max() == segments.max()
            for number in numbers:
                source = batch["encoder_input_tokens"][row][segments == number]
                mine = batch["decoder_segment_ids"][row] == number
                target = batch["decoder_target_tokens"][row][mine]
                # Shifted right within the example: it starts from 0 and never sees a neighbour.
                shifted = batch["decoder_input_tokens"][row][mine]
                assert shifted.tolist() == [0, *target[:-1]]
                pairs.append((tuple(source.tolist()), tuple(target.tolist())))
    return pairs


def pairs_of(examples: data.Examples) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(source.tolist()), tuple(target.tolist())) for source, target in examples]


def test_once_holds_every_example_once() -> None:
    examples = some_examples(57)
    batches = data.Mixture([(examples, 1.0)], 4, SOURCE, TARGET).once()
    assert sorted(unpacked(batches)) == sorted(pairs_of(examples))
    for batch in batches:
        assert batch["encoder_input_tokens"].shape == (4, SOURCE)
        padding = batch["decoder_segment_ids"] == 0
        np.testing.assert_array_equal(batch["decoder_loss_weights"], ~padding)
        assert not batch["decoder_target_tokens"][padding].any()
        assert all(column.dtype == np.int32 for column in batch.values())


def test_rows_are_well_filled() -> None:
    batches = data.Mixture([(some_examples(2000), 1.0)], 8, 128, 128).once()
    assert np.mean([(b["encoder_segment_ids"] > 0).mean() for b in batches]) > 0.9


def test_first_fit_takes_the_first_row_with_room_for_both_sides() -> None:
    rows, numbers, sources, targets = data.first_fit(
        np.array([6, 6, 4, 2, 3]), np.array([1, 1, 1, 8, 1]), (10, 9)
    )
    assert rows.tolist() == [0, 1, 0, 1, 2]
    assert numbers.tolist() == [1, 1, 2, 2, 1]
    assert sources.tolist() == [0, 0, 6, 6, 0]
    assert targets.tolist() == [0, 0, 1, 1, 0]


def test_an_epoch_shows_each_example_its_weight_of_times() -> None:
    twice, half = some_examples(40, 0), some_examples(40, 1)
    mixture = data.Mixture([(twice, 2.0), (half, 0.5)], 1, SOURCE, TARGET)
    batches = mixture.batches(seed=3)
    epoch = [next(batches) for _ in range(mixture.steps_per_epoch)]
    # The first epoch decides the number of steps for seed 0; another seed's may lack a row.
    counts = [0, 0]
    for source, _ in unpacked(epoch):
        counts[source[0] >= 102] += 1
    assert counts[0] == pytest.approx(80, abs=5)
    assert counts[1] == pytest.approx(20, abs=5)


def test_batches_depend_on_seed_and_step_alone() -> None:
    def mixture() -> data.Mixture:
        return data.Mixture([(some_examples(50), 1.5)], 3, SOURCE, TARGET)

    straight = mixture().batches(seed=5)
    run = [next(straight) for _ in range(3 * mixture().steps_per_epoch)]
    for start in (0, 1, mixture().steps_per_epoch, len(run) - 2):
        resumed = mixture().batches(seed=5, start_step=start)
        for batch in run[start : start + 2]:
            for name, column in next(resumed).items():
                np.testing.assert_array_equal(column, batch[name])
    assert not np.array_equal(
        run[0]["encoder_input_tokens"], run[mixture().steps_per_epoch]["encoder_input_tokens"]
    )
    other = next(mixture().batches(seed=6))
    assert not np.array_equal(run[0]["encoder_input_tokens"], other["encoder_input_tokens"])


def test_examples_that_do_not_fit_are_left_out_whole() -> None:
    """Those that fill a row to its end are kept; those without a target are not."""
    full, over = np.full(SOURCE, 5), np.full(SOURCE + 1, 7)
    examples = data.ragged(
        [full, np.full(2, 6), over, np.full(2, 8), np.full(2, 8)],
        [np.full(2, 9), np.full(TARGET, 10), np.full(2, 11), np.full(TARGET + 1, 12), np.zeros(0)],
    )
    mixture = data.Mixture([(examples, 1.0)], 2, SOURCE, TARGET)
    assert unpacked(mixture.once()) == [((5,) * SOURCE, (9,) * 2), ((6,) * 2, (10,) * TARGET)]


def test_prompts_and_their_continuations_make_whole_texts() -> None:
    """As a decoder-only target writes them: prompts of 4 to 23 tokens, at most half a text."""
    texts = [np.arange(2, 2 + size) for size in (3, 9, *[60] * 30)]
    examples = data.ragged([np.zeros(0, np.int32)] * len(texts), texts)
    prompts = data.prompts(examples)
    sizes = []
    for (prompt, target), text in zip(prompts, texts, strict=True):
        assert prompt.tolist() == [0, *text[: len(prompt) - 1]]
        assert len(target) == 0
        sizes.append(len(prompt) - 1)
    assert sizes[:2] == [1, 4]
    assert set(sizes[2:]) == set(range(4, 24))
    rest = [text[size:] for text, size in zip(texts, sizes, strict=True)]
    written = data.ragged([prompt for prompt, _ in prompts], rest)
    assert pairs_of(data.whole_texts(written)) == pairs_of(examples)


def test_saved_examples_are_loaded(tmp_path: pathlib.Path) -> None:
    examples = some_examples(9)
    examples.save(tmp_path / "deep" / "some.npz")
    assert pairs_of(data.load(tmp_path / "deep" / "some.npz")) == pairs_of(examples)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["some.npz"]


def test_bad_files_and_mixtures_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.npz does not exist"):
        data.load(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"text\.npz is no \.npz of tokenised examples"):
        data.load(tmp_path / "text.npz")
    data.ragged([], []).save(tmp_path / "empty.npz")
    with pytest.raises(ValueError, match=r"empty\.npz has no examples"):
        data.load(tmp_path / "empty.npz")
    shifted = dataclasses.replace(some_examples(3), targets_offsets=np.arange(1, 5))
    shifted.save(tmp_path / "shifted.npz")
    with pytest.raises(ValueError, match=r"shifted\.npz has .*do not fit its targets"):
        data.load(tmp_path / "shifted.npz")
    with pytest.raises(ValueError, match="positive weight"):
        data.Mixture([(some_examples(3), 0.0)], 2, SOURCE, TARGET)
    with pytest.raises(ValueError, match="ask for longer rows"):
        data.Mixture([(some_examples(3), 1.0)], 2, 1, 1)
