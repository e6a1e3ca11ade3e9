"""Trains the SentencePiece vocabulary that the shipped pair uses.

    python scripts/train_vocabulary.py --data_dir=data

Reads the training splits of both Debian tasks (never validation or test) and writes a unigram
model with T5's ids (pad 0, eos 1, unk 2) and byte fallback, so that any text has an encoding.
"""

import argparse
import hashlib
import json
import pathlib

import sentencepiece

from speculative import disk

FILES = ("debian_ende/train.jsonl", "debian_ende/extra.jsonl", "debian_synopsis/train.jsonl")
OPTIONAL = {"debian_ende/extra.jsonl"}
ASSET = pathlib.Path(__file__).parent.parent / "speculative" / "assets" / "debian.model"


def read_texts(data_dir: pathlib.Path, sentences: int) -> list[str]:
    """A sample of the distinct texts of all files.

    It is ordered by hash, and so does not follow the alphabet or the order of the files.
    """
    texts: set[str] = set()
    for name in FILES:
        path = data_dir / name
        if not path.exists() and name in OPTIONAL:
            continue
        try:
            lines = disk.lines(disk.text(path))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path} does not exist; build it with "
                f"python scripts/build_debian_corpus.py --mirror=MIRROR --output_dir={data_dir}"
            ) from error
        for line in lines:
            example = json.loads(line)
            texts |= {example["inputs"], example["targets"]}
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())[:sentences]


def train(texts: list[str], output: pathlib.Path, vocabulary_size: int) -> None:
    """Trains on one thread, because the pieces' scores are sums whose order must not vary."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            vocab_size=vocabulary_size,
            model_type="unigram",
            byte_fallback=True,
            character_coverage=0.99995,
            normalization_rule_name="nmt_nfkc",
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,
            max_sentence_length=16384,
            minloglevel=1,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the vocabulary of the shipped pair.")
    parser.add_argument("--data_dir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=ASSET)
    parser.add_argument("--vocabulary_size", type=int, default=8192)
    parser.add_argument("--sentences", type=int, default=200_000, help="texts to train on")
    arguments = parser.parse_args()
    try:
        texts = read_texts(arguments.data_dir, arguments.sentences)
        train(texts, arguments.output, arguments.vocabulary_size)
    except (OSError, RuntimeError) as error:
        parser.exit(2, f"error: {error}\n")
    checksum = hashlib.sha256(arguments.output.read_bytes()).hexdigest()
    print(
        f"{arguments.output}: {arguments.vocabulary_size} pieces from {len(texts)} texts, "
        f"SHA256 {checksum}"
    )


if __name__ == "__main__":
    main()
