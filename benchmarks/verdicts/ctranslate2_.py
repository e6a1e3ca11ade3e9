"""Draws texts with CTranslate2, after its own conversion of the folder; it does not speculate.

Run it with an interpreter that has ctranslate2, transformers and torch; it needs nothing else of
this repository.
"""
# pyright: reportMissingImports=false

import json
import pathlib
import tempfile
from types import SimpleNamespace
from typing import Any

import ctranslate2
import transformers
from ctranslate2.converters import TransformersConverter

from benchmarks.verdicts.adapter import command_line, end_tokens, read_config

SETTINGS = ["top_k", "top_p"]
AS_CONVERTED = "float32 as converted"
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"settings": SETTINGS},
    AS_CONVERTED: {"kinds": ["encoder-decoder"], "settings": SETTINGS},
}


def convert(source: str, folder: str, quantization: str, corrected: bool = True) -> None:
    """Writes a Hugging Face folder as CTranslate2 reads it, with tokens named by their numbers.

    From version 5, transformers' T5 reports embeddings as tied even if they are not, and the
    converter then divides logits by the root of their width: greedy outputs are the same, samples
    are not. If `corrected`, the converter gets the model's own flag.
    """
    config = read_config(source)
    converter = TransformersConverter(source)
    tokenizer = SimpleNamespace(
        bos_token=str(config.get("bos_token_id") or 0),
        pad_token=str(config.get("pad_token_id") or 0),
        eos_token=str(end_tokens(source)[0]),
        unk_token=str(config.get("unk_token_id") or 0),
        get_vocab=lambda: {str(i): i for i in range(config["vocab_size"])},
        convert_ids_to_tokens=str,
    )
    converter.load_tokenizer = lambda *_, **__: tokenizer
    load_model = converter.load_model

    def with_own_flag(*arguments: Any, **settings: Any) -> Any:
        model = load_model(*arguments, **settings)
        if hasattr(model.config, "scale_decoder_outputs"):
            model.config.tie_word_embeddings = model.config.scale_decoder_outputs
        return model

    if corrected:
        converter.load_model = with_own_flag
    converter.convert(folder, quantization=quantization, force=True)


def main() -> None:
    """Runs the command line."""
    parser = command_line(__doc__)
    arguments = parser.parse_args()
    if arguments.list:
        version = ctranslate2.__version__
        print(json.dumps({"version": version, "ways": WAYS}))
        return
    if arguments.min_p != 0:
        parser.error("CTranslate2 has no min_p.")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ctranslate2.set_random_seed(arguments.seed)
    config, kind = read_config(arguments.target), arguments.way.split()[0]
    translates = config.get("is_encoder_decoder", False)
    options = {
        "beam_size": 1,
        "num_hypotheses": arguments.samples,
        "sampling_temperature": arguments.temperature,
        "sampling_topk": arguments.top_k,
        "sampling_topp": arguments.top_p,
        "end_token": [str(end) for end in end_tokens(arguments.target)],
        "return_end_token": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        convert(arguments.target, folder, kind, arguments.way != AS_CONVERTED)
        engine = ctranslate2.Translator if translates else ctranslate2.Generator
        engine = engine(folder, compute_type=kind, inter_threads=1, intra_threads=1)
        with open(arguments.output, "w") as output:
            for line in pathlib.Path(arguments.prompts).read_text().splitlines():
                prompt = json.loads(line)["prompt_tokens"]
                fed = [[str(token) for token in prompt]]
                if translates:
                    most = {"max_decoding_length": arguments.max_length, "max_input_length": 0}
                    texts = engine.translate_batch(fed, **most, min_decoding_length=0, **options)[
                        0
                    ].hypotheses
                else:
                    texts = engine.generate_batch(
                        fed,
                        max_length=arguments.max_length,
                        include_prompt_in_result=False,
                        **options,
                    )[0].sequences
                for text in texts:
                    tokens = [int(token) for token in text]
                    print(json.dumps({"prompt_tokens": prompt, "tokens": tokens}), file=output)


if __name__ == "__main__":
    main()
