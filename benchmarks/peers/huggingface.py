"""Hugging Face transformers: `generate`, alone and with the draft as its assistant."""
# pyright: reportMissingImports=false

from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from benchmarks.peers.system import Setting, thread_counts
from benchmarks.verdicts.transformers_ import fix_guesses
from speculative import checkpoints
from speculative.models import names_of
from speculative.models.reads import Reads


class HuggingFace:
    """See `system.Program`."""

    def __init__(self, setting: Setting) -> None:
        torch.set_grad_enabled(False)
        quieten()
        self._decoder_only, most = setting.decoder_only, setting.max_length
        kind = AutoModelForCausalLM if setting.decoder_only else T5ForConditionalGeneration
        self._target = kind.from_pretrained(setting.exported, dtype=torch.float32).eval()
        ends = self._target.generation_config.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        self._given: dict[str, Any] = {"num_beams": 1, "max_new_tokens": most, "pad_token_id": 0}
        self._given |= {"min_new_tokens": most} if setting.random else {}
        ways: dict[str, dict[str, Any]] = {"autoregressive": {}}
        drafts: list[Any] = []
        if setting.decoder_only:
            ways["prompt lookup"] = {"prompt_lookup_num_tokens": setting.gamma}
            if exported := setting.exported_draft:
                drafts = [kind.from_pretrained(exported, dtype=torch.float32) for _ in range(2)]
        elif setting.draft:
            drafts = [_assistant(setting.draft, self._target) for _ in range(2)]
        if drafts:
            fixed, own = drafts
            fix_guesses(fixed, setting.gamma)
            ways["assisted"] = {"assistant_model": fixed}
            # The other assistant chooses the number of guesses per step by itself.
            ways["assisted, own γ"] = {"assistant_model": own}
        self._ways = {
            f"{way}, {name}": (extra, threads)
            for way, extra in ways.items()
            for name, threads in thread_counts().items()
        }
        self.ways = tuple(self._ways)

    def decode(self, way: str, source: list[int]) -> list[int]:
        extra, threads = self._ways[way]
        torch.set_num_threads(threads)
        options, fed = self._given | extra, torch.tensor([source])
        options["attention_mask"] = torch.ones_like(fed)  # A prompt may begin with token 0.
        if not self._decoder_only:
            # By default `generate` makes a cache with as many layers as the encoder.
            options["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        begun = fed.shape[1] if self._decoder_only else 1
        text = self._target.generate(fed, **options)[0, begun:].tolist()
        # Padding follows a text's end, and so may an assistant's last guesses.
        stop = next((i + 1 for i, token in enumerate(text) if token in self._ends), None)
        return text[:stop]

    def prefill(self, source: list[int]) -> None:
        torch.set_num_threads(max(thread_counts().values()))
        if self._decoder_only:
            self._target(torch.tensor([source]), logits_to_keep=1)
            return
        encoded = self._target.encoder(torch.tensor([source])).last_hidden_state
        for block in self._target.decoder.block:
            block.layer[1].EncDecAttention.k(encoded)
            block.layer[1].EncDecAttention.v(encoded)

    def margin(self, source: list[int], prefix: list[int], one: int, other: int) -> float:
        if self._decoder_only:
            logits = self._target(torch.tensor([source + prefix])).logits[0, -1]
        else:
            fed = torch.tensor([[self._target.config.decoder_start_token_id, *prefix]])
            logits = self._target(torch.tensor([source]), decoder_input_ids=fed).logits[0, -1]
        return abs(float(logits[one] - logits[other]))


def quieten() -> None:
    """Turns off progress bars and warnings, which would appear among the results."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


class _Shared(torch.nn.Module):
    """The encoder of an assistant that shares the target's: returns the latter's last output."""

    main_input_name = "input_ids"

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        encoder.register_forward_hook(self._keep)

    def _keep(self, encoder: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._last_output = output[0]

    def forward(self, *_: Any, **__: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self._last_output)


def _assistant(name: str, target: T5ForConditionalGeneration) -> T5ForConditionalGeneration:
    """Our draft as a transformers model; an encoder shared with the target runs once for both."""
    checkpoint = checkpoints.open(name)
    config, reads = checkpoint.config, checkpoint.config.reads.source_dim
    # Their model always has an encoder; if the draft has none, it is replaced below.
    shape = config.replace(reads=Reads(), num_encoder_layers=1) if reads else config
    kind = names_of(shape)
    model = T5ForConditionalGeneration(T5Config(**kind.settings(shape, name))).eval()
    if reads:
        model.encoder = _Shared(target.encoder)
        width = config.num_heads * config.head_dim
        for block in model.decoder.block:
            block.layer[1].EncDecAttention.k = torch.nn.Linear(reads, width, False)
            block.layer[1].EncDecAttention.v = torch.nn.Linear(reads, width, False)
    values = {}
    for parameter, stored in kind.names(shape).items():
        if all(part in checkpoint.tensors for part in stored.parts):
            value = np.concatenate([checkpoint.read(part) for part in stored.parts], axis=-1)
            values[parameter] = torch.tensor(value.T if stored.transposed else value)
    unknown = model.load_state_dict(values, strict=False).unexpected_keys
    assert not unknown, unknown
    return model
