"""A checkpoint in any format: its configuration, and its tensors, which are read one by one."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh
from safetensors.numpy import save_file

from speculative import disk, fingerprints
from speculative.backends import Weight, quantized_on_host
from speculative.fingerprints import sha256
from speculative.models import Config, abstract_params, sharding
from speculative.models.config import AXES
from speculative.models.reads import packed, unpacked
from speculative.special_tokens import SpecialTokens
from speculative.types import PyTree
from speculative.vocabulary import Vocabulary, open_vocabulary, store

CONFIG = "config.json"  # Describes the model in native and Hugging Face folders.
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The number formats in which checkpoints are written."""
LOGITS = "decoder/logits_dense/kernel"

FLOATS = ("float32", "bfloat16", "float16", "float64")  # Those that are read.


Part = tuple[slice, ...]
"""A part of an array: a slice along each axis; an empty tuple is the whole array."""


class Tensor(NamedTuple):
    """A tensor that is not read yet."""

    shape: tuple[int, ...]  # In T5X's orientation: kernels are [in, out].
    dtype: str  # As stored: one of `FLOATS`, or "int8".
    # Returns the values of a part, by default all, in a floating-point format.
    read: Callable[..., np.ndarray]
    # Returns the values of a part as they are stored, where dtype is int8.
    quantized: Callable[..., Weight] | None = None


def read_settings(folder: str | pathlib.Path) -> dict[str, Any]:
    """The contents of a folder's `config.json`, empty without one; ValueError if it is damaged."""
    path = pathlib.Path(folder) / CONFIG
    return disk.read_json(path) if path.is_file() else {}


def plain(name: Any, where: object) -> str:
    """The name of a file that a checkpoint lists; ValueError if it may be in another folder."""
    if not isinstance(name, str) or name in ("", "..") or pathlib.PurePath(name).name != name:
        raise ValueError(
            f"{where} names the file {name!r}; a checkpoint's files lie in its own folder, so this "
            "must be a plain name. Do not trust this checkpoint; fetch it from where it was made."
        )
    return name


# Files that are read from a folder besides its vocabulary, by format; T5X's optimizer state is not.
OTHERS = (
    "*.safetensors",
    "*.bin",
    "*config.json",
    "*.index.json",
    "*token*.json",
    "merges.txt",
    "*.jinja",
)
FILES = {"t5x": ("checkpoint", "target.*/**/*"), "native": OTHERS, "huggingface": OTHERS}


class MadeFor(NamedTuple):
    """The target whose hidden states a draft learned to read."""

    name: str  # Its name at that time.
    fingerprint: tuple[float, ...]  # See `Checkpoint.fingerprint`.


@dataclasses.dataclass(frozen=True, eq=False)
class Checksums:
    """SHA-256 of files, computed once and when needed; `recorded` ones must match."""

    recorded: Mapping[pathlib.Path, str] = dataclasses.field(default_factory=dict)
    extent: str = "none: this format has none, so only shapes and ranges are checked"
    sha256: Callable[..., str] = dataclasses.field(default_factory=lambda: functools.cache(sha256))

    def verify(self, path: pathlib.Path) -> None:
        """Raises ValueError if a file's checksum differs from the recorded one."""
        if path in self.recorded and self.sha256(path) != self.recorded[path]:
            raise ValueError(
                f"{path} was altered or cut off: its checksum is not that in {CONFIG}; fetch "
                "the checkpoint again."
            )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; raises ValueError unless its tensors fit its configuration."""

    location: str  # The folder or address, for messages.
    format: str  # "native", "t5x" or "huggingface".
    config: Config
    tensors: Mapping[str, Tensor]  # By T5X's names, with "/" between parts.
    vocabulary: pathlib.Path | None = None  # The file next to the weights, or `BYTES`.
    extra_ids: int = 0  # Sentinel tokens after the vocabulary's pieces; T5's own has 100.
    special: SpecialTokens = SpecialTokens()  # Its settings for tokens, besides the vocabulary.
    checksums: Checksums = dataclasses.field(default_factory=Checksums)
    made_for: MadeFor | None = None  # Set if it is a draft that reads its target's decoder.
    # Time of all training steps, including those of the checkpoint it began from; None if unknown.
    training_minutes: float | None = None
    note: str = ""  # A message about its generation settings that are not applied.

    def __post_init__(self) -> None:
        where, extra_ids, most = self.location, self.extra_ids, 2**16
        if type(extra_ids) is not int or not 0 <= extra_ids <= most:
            raise ValueError(
                f"{where} has the extra_ids {extra_ids!r}; the number of sentinels after a "
                f"vocabulary's pieces must be a whole number from 0 to {most}."
            )
        rows, special = self.config.vocab_size, self.special
        for name, ids in (("end", special.eos_ids), ("start", [special.start_id])):
            if beyond := [token for token in ids if token is not None and token >= rows]:
                raise ValueError(
                    f"{where} has the {name} token {beyond[0]}, outside the {rows} rows of its "
                    f"embedding; correct it in {CONFIG} or generation_config.json."
                )
        require_layers(self.config, len(self.tensors), where)
        expected = by_name(abstract_params(self.config))
        for name in sorted(expected.keys() | self.tensors.keys()):
            if name not in self.tensors:
                raise ValueError(f"{where} lacks the tensor {name}.")
            if name not in expected:
                raise ValueError(f"{where} has a tensor {name}, unknown to its configuration.")
            (shape, kind, *_), wanted = self.tensors[name], expected[name].shape
            if shape != wanted:
                raise ValueError(
                    f"Tensor {name} of {where} is {shape}; its configuration asks for {wanted}."
                )
            if kind not in FLOATS and (self.format, kind) != ("native", "int8"):
                raise ValueError(
                    f"Tensor {name} of {where} is of type {kind}; supported: {', '.join(FLOATS)}."
                )

    @property
    def dtype(self) -> str:
        """The number format in which a copy loses nothing."""
        stored = {tensor.dtype for tensor in self.tensors.values()}
        return "bfloat16" if stored == {"bfloat16"} else "float32"

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def fingerprint(self) -> tuple[float, ...]:
        """Values that identify the model in any format: those of its last norm, never quantized."""
        return tuple(self.read("decoder/decoder_norm/scale")[:16].tolist())  # Enough to tell.

    def has(self, fingerprint: Sequence[float]) -> bool:
        """Whether this is the model's fingerprint, up to rounding to bfloat16."""
        own = self.fingerprint()
        return len(own) == len(fingerprint) and np.allclose(own, fingerprint, 1 / 128, atol=0)

    @functools.cached_property
    def contents(self) -> str:
        """The fingerprint of its files except the vocabulary, see `fingerprints.of_files`.

        A remote folder's covers the tensors' names, shapes and types, and the last norm.
        """
        folder = pathlib.Path(self.location)
        if not folder.is_dir():
            sizes = {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}
            return fingerprints.of_value([sizes, self.fingerprint()])
        paths = {path for pattern in FILES[self.format] for path in folder.glob(pattern)}
        files = {str(path.relative_to(folder)): path for path in paths - {self.vocabulary}}
        files = {name: path for name, path in sorted(files.items()) if path.is_file()}
        return fingerprints.of_files(files, self.checksums.recorded, self.checksums.sha256)

    def read(self, name: str, part: Part = ()) -> np.ndarray:
        """A tensor's values; raises ValueError if they cannot be read or are not finite."""
        fault = f"has a tensor {name} that cannot be read"
        with disk.reading(self.location, fault), np.errstate(invalid="ignore", over="ignore"):
            value = self.tensors[name].read(part)
            if value.dtype == np.float64:  # It is computed in float32, which may overflow.
                value = value.astype(np.float32)
            # The sum of finite values hardly ever overflows, and needs no array of flags.
            if not np.isfinite(np.sum(value, dtype=np.float64)):
                raise ValueError(
                    f"Tensor {name} of {self.location} holds values that are not finite."
                )
        return value

    def quantized(self, name: str, part: Part = ()) -> Weight:
        """A kernel's or an embedding's values in int8, in NumPy; raises like `read`.

        A part must include all inputs of its outputs.
        """
        stored = self.tensors[name].quantized
        if stored is None:
            return quantized_on_host(self.read(name, part), AXES[name.rpartition("/")[2]])
        with disk.reading(self.location, f"has a tensor {name} that cannot be read"):
            weight = stored(part)
            if not np.isfinite(weight.scales).all():
                raise ValueError(
                    f"Tensor {name} of {self.location} holds values that are not finite."
                )
        return weight

    def numpy(self) -> PyTree:
        """All parameters as T5X's tree of float32 NumPy arrays."""
        values = {name: self.read(name).astype(np.float32) for name in self.tensors}
        return traverse_util.unflatten_dict(values, sep="/")

    def load(
        self,
        dtype: str,
        quantize: str = "none",
        on: Mesh | None = None,
        whole: bool = False,
        training: bool = False,
    ) -> PyTree:
        """All parameters on JAX's device as T5X's tree, in the number format `dtype`.

        Those of `Config.in_int8` are `Weight` unless `quantize` is "none". On a mesh every device
        gets only its part of the `sharding.padded` model or, if `whole`, all of the model; if
        `training`, its part as in `sharding.of_training`. A process reads only what its own devices
        get. The host's memory holds one tensor, or one device's part of it, which is cast before it
        leaves the host.
        """
        config = self.config.replace(dtype=dtype, quantize=quantize)
        if on is not None and not whole and not training:
            config = sharding.padded(config, on.shape[sharding.MODEL])
        placed = by_name(sharding.placed(config, on, whole, training))
        values = {name: self._loaded(name, config, placed[name]) for name in self.tensors}
        return traverse_util.unflatten_dict(values, sep="/")

    def _loaded(self, name: str, config: Config, placed: Any) -> PyTree:
        """An array or a `Weight`, with the shape of `placed` and its sharding, if it has one."""
        kernel = placed.values if isinstance(placed, Weight) else placed
        parts: dict[Any, tuple[slice, ...]] = {None: ()}  # By device.
        if kernel.sharding is not None:
            parts = dict(kernel.sharding.addressable_devices_indices_map(kernel.shape))
        arrays, quantized, read = {}, self._of_whole(name, config, kernel), dict[str, PyTree]()
        for device, index in sorted(parts.items(), key=lambda item: str(item[1])):
            if (key := str(index)) not in read:  # A part that devices share is read once.
                read = {key: self._part(name, config, kernel.shape, index, quantized)}
            # It must be a copy: on CPU a view would keep the host's array, and its file, in memory.
            made = jax.device_put(read[key], device, may_alias=False)
            arrays[device] = jax.block_until_ready(made)
        if kernel.sharding is None:
            return arrays[None]
        return jax.tree.map(
            lambda one, *of_devices: jax.make_array_from_single_device_arrays(
                one.shape, one.sharding, [*of_devices]
            ),
            placed, *(arrays[device] for device in parts),
        )  # fmt: skip

    def _of_whole(self, name: str, config: Config, kernel: Any) -> Weight | None:
        """The whole kernel in int8, if devices split its inputs: scales depend on all of them."""
        if not config.in_int8(name) or self.tensors[name].quantized or kernel.sharding is None:
            return None
        axis = AXES[name.rpartition("/")[2]]
        one_device = kernel.sharding.shard_shape(kernel.shape)
        return None if one_device[axis] == kernel.shape[axis] else self.quantized(name)

    def _part(
        self,
        name: str,
        config: Config,
        shape: tuple[int, ...],
        index: Part,
        quantized: Weight | None,
    ) -> PyTree:
        """The part at NumPy's `index` of a tensor padded with zeros to a shape; () takes all.

        `quantized` is the whole tensor, if it is in int8 already.
        """
        stored, in_int8 = self.tensors[name].shape, config.in_int8(name)
        ends = [one.indices(size)[:2] for one, size in zip(index, shape, strict=False)]
        kept = [
            (min(low, size), min(high, size))
            for (low, high), size in zip(ends, stored, strict=False)
        ]
        # A part beyond the tensor's end still reads one entry, for the scales of other axes.
        part = tuple(slice(low, high) if low < high else slice(0, 1) for low, high in kept)
        part = () if part == tuple(slice(0, size) for size in stored) else part
        kind = DTYPES[config.dtype]
        if quantized is not None:
            outputs = 1 - AXES[name.rpartition("/")[2]]
            value = Weight(quantized.values[part], quantized.scales[part[outputs] if part else ()])
        elif in_int8:
            value = self.quantized(name, part)
        else:
            value = self.read(name, part).astype(kind)

        def filled(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
            sizes = [(kept[axis][1] - kept[axis][0], np.diff(ends[axis])[0]) for axis in axes]
            if all(here == size for here, size in sizes):
                return x
            x = x[tuple(slice(here) for here, _ in sizes)]
            return np.pad(x, [(0, size - here) for here, size in sizes])

        if not index:
            return value
        if not isinstance(value, Weight):
            return filled(value, range(len(index)))
        outputs = 1 - AXES[name.rpartition("/")[2]]
        return Weight(filled(value.values, (0, 1)), filled(value.scales, (outputs,)))

    def open_vocabulary(self) -> Vocabulary | None:
        """The vocabulary, if there is one; raises ValueError if its file is altered or damaged."""
        if self.vocabulary is None:
            return None
        self.checksums.verify(self.vocabulary)
        return open_vocabulary(
            self.vocabulary, self.extra_ids, self.special, self.config.vocab_size
        )

    def store_vocabulary(self, folder: pathlib.Path) -> str | None:
        """Copies the vocabulary, if there is one, into a folder; returns its file's name there."""
        if self.vocabulary is None:
            return None
        self.checksums.verify(self.vocabulary)
        return store(self.vocabulary, folder, self.special)


def narrowed(checkpoint: Checkpoint, tokens: Sequence[int] | np.ndarray) -> Checkpoint:
    """A draft with logits for these tokens only: it guesses no others, and costs less.

    Raises ValueError if there are no tokens, one is not guessed already, or the logits are tied.
    """
    if not len(tokens):
        raise ValueError("A draft must guess some tokens; keep at least one.")
    reads, before = checkpoint.config.reads, checkpoint.config.reads.draft_vocabulary
    reads = dataclasses.replace(reads, draft_vocabulary=packed(tokens))
    config = checkpoint.config.replace(reads=reads)
    guessed = unpacked(before) if before else np.arange(config.vocab_size)
    wanted = unpacked(reads.draft_vocabulary)
    if len(unknown := np.setdiff1d(wanted, guessed)):
        raise ValueError(f"{checkpoint.location} does not guess token {unknown[0]}; leave it out.")
    columns, whole = np.searchsorted(guessed, wanted), checkpoint.tensors[LOGITS]
    part = whole._replace(
        shape=(whole.shape[0], len(columns)),
        read=lambda part=(): whole.read()[:, columns][part],
        quantized=None,
    )
    tensors = {**checkpoint.tensors, LOGITS: part}
    return dataclasses.replace(checkpoint, config=config, tensors=tensors)


def in_memory(location: str, config: Config, params: PyTree) -> Checkpoint:
    """A checkpoint of parameters that are in memory already."""
    tensors = {
        name: Tensor(x.shape, str(x.dtype), lambda part=(), x=x: np.asarray(x)[part])
        for name, x in by_name(params).items()
    }
    return Checkpoint(location, "native", config, tensors)


def by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree of parameters by name, "/" between the parts."""
    return dict(traverse_util.flatten_dict(tree, sep="/"))


def require_layers(config: Config, tensors: int, where: object) -> None:
    """ValueError if there are more layers than tensors: naming a billion would take forever."""
    if (layers := sum(getattr(config, depth) for depth in config.depths)) > tensors:
        raise ValueError(
            f"{where} holds {tensors} tensors, too few for the {layers} layers of its {CONFIG}; "
            "fetch it again or restore it."
        )


def vacant(folder: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a folder to be created; ValueError if it exists, or would be remote."""
    if str(folder).startswith("gs://"):
        raise ValueError(
            f"{folder} is remote, and checkpoints are written into local folders; choose one, and "
            "copy it there."
        )
    if os.path.lexists(folder):
        raise ValueError(f"{folder} exists already; remove it or choose another folder.")
    return pathlib.Path(folder)


@contextlib.contextmanager
def written(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A folder to fill, which becomes `folder` when the block ends, or is removed if it fails.

    Raises ValueError if `folder` exists.
    """
    with disk.written(vacant(folder)) as unfinished:
        unfinished.mkdir()
        yield unfinished
        vacant(folder)


def write_tensors(
    folder: pathlib.Path,
    sizes: Mapping[str, int],
    limit: int,
    values: Callable[[str], dict[str, np.ndarray]],
    metadata: dict[str, str] | None = None,
) -> dict[str, str]:
    """Writes safetensors files of at most `limit` bytes, unless a single tensor is larger.

    The tensors of one file are in memory at a time. `sizes` holds the bytes of each tensor by
    name, in the order of writing; `values` returns the arrays to store for a name. Returns
    the file of each name: `model.safetensors`, or one of several.
    """
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = {}
    for number, names in enumerate(shards, 1):
        part = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        path = folder / f"model{part}.safetensors"
        arrays = (item for name in names for item in values(name).items())
        save_file({key: np.ascontiguousarray(x) for key, x in arrays}, path, metadata)
        path.chmod(0o644)  # safetensors makes files that only their owner can read.
        files |= dict.fromkeys(names, path.name)
    return files
