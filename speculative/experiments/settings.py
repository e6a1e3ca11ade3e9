"""What a row of a table is measured with: one gin file a row."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

import gin

from speculative import gin_files, tasks
from speculative.decoding import Decoding
from speculative.sampling import Sampling
from speculative.types import EOS_ID


@gin.register(module="settings")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowConfig:
    """A row's settings; all that its numbers depend on, but for the machine.

    Attributes:
        task: a name of `tasks.TASKS`.
        target: a model's name; `weights` says what is behind it.
        draft: likewise, or one of `pair.MODEL_FREE`.
        temperature: 0 is argmax.
        top_k: the likeliest tokens that are kept; 0 is all.
        top_p: their mass, in (0, 1].
        lenience: l in (0, 1] of appendix A.5; below 1 outputs are not the target's own.
        gamma: guesses a step; None chooses the best one for measured alpha, c and v.
        dtype: of weights and products; None is as the checkpoints say.
        max_length: tokens at which an output is cut.
        num_examples: examples measured; None is all there are.
        alpha_tokens: tokens of the target's own text on which alpha is measured (section 4.2).
        rounds: how often each example is decoded each way.
        seed: of all random numbers.
        paper_draft: the draft of the paper's row that this one is set beside, if any.
        simulated_alpha: accept each guess with this chance, whatever the models say: for the
            times of models whose weights are random. None decodes.
        source_length: tokens of a made-up source, where there is no text to decode.
        checkpoints: the folder in which models are looked for, as `task/name` or `name`;
            "random" gives models of `models.SIZES` random weights; None takes names as they are.
        vocabulary: SentencePiece model for checkpoints that come without one.
        data_file: the texts, as `tasks.prompts.load_prompts` takes them; None is the task's own.

    Raises:
        ValueError: a value outside its range.
    """

    task: str
    target: str
    draft: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    lenience: float = 1.0
    gamma: int | None = None
    dtype: str | None = None
    max_length: int = 128
    num_examples: int | None = None
    alpha_tokens: int = 10_000
    rounds: int = 3
    seed: int = 0
    paper_draft: str | None = None
    simulated_alpha: float | None = None
    source_length: int = 64
    checkpoints: str | None = None
    vocabulary: str | None = None
    data_file: str | None = None

    def __post_init__(self) -> None:
        Sampling(float(self.temperature), self.top_k, float(self.top_p))
        tasks.task(self.task)
        for name in ("gamma", "max_length", "num_examples", "alpha_tokens", "rounds"):
            value = getattr(self, name)
            optional = name in ("gamma", "num_examples")
            if value is None and optional:
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"RowConfig.{name} must be a whole number from 1, not {value!r}.")
        lenience = self.lenience
        if not (isinstance(lenience, int | float) and 0 < lenience <= 1):
            raise ValueError(f"RowConfig.lenience must be a number in (0, 1], not {lenience!r}.")
        alpha = self.simulated_alpha
        if alpha is not None and not (0 <= alpha <= 1 and math.isfinite(alpha)):
            raise ValueError(f"RowConfig.simulated_alpha must lie in [0, 1], not {alpha}.")
        if alpha is not None and self.gamma is None:
            raise ValueError(
                "Simulated acceptance tells nothing of the best gamma; set RowConfig.gamma."
            )

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(float(self.temperature), self.top_k, float(self.top_p))

    @property
    def exact(self) -> bool:
        """Whether speculative outputs are the target's own: real, and not lenient."""
        return self.simulated_alpha is None and self.lenience == 1

    def decoding(self, vocab_size: int, gamma: int, eos_id: int = EOS_ID) -> Decoding:
        """The settings of a generation with so many guesses a step; 0 decodes plainly."""
        config = Decoding(vocab_size, self.sampling, gamma, self.max_length, eos_id)
        if gamma:
            config = dataclasses.replace(
                config, lenience=float(self.lenience), simulated_alpha=self.simulated_alpha
            )
        # No token ends a text of random words.
        return config if self.simulated_alpha is None else config.endless

    def gin(self) -> str:
        """The effective configuration, as a gin file says it."""
        fields = dataclasses.asdict(self)
        return "".join(f"RowConfig.{name} = {value!r}\n" for name, value in fields.items())


def parse(file: str | pathlib.Path, bindings: Sequence[str] = ()) -> RowConfig:
    """The row that a gin file describes, changed by bindings like `RowConfig.gamma = 3`.

    Raises:
        ValueError: there is no such file, it names a parameter that does not exist, a value is
            missing or out of range; the message names the file.
    """
    file = pathlib.Path(file)
    if not file.is_file():
        raise ValueError(f"There is no configuration {file}.")
    gin.clear_config()
    try:
        gin_files.read(file, bindings)
        return gin.get_configurable(RowConfig)()
    except (TypeError, AttributeError, NameError, ValueError, SyntaxError, OSError) as error:
        missing = [field for field in _required() if f"'{field}'" in str(error)]
        if isinstance(error, TypeError) and missing:
            raise ValueError(
                f"{file} gives no value for RowConfig.{missing[0]}; add a line "
                f"RowConfig.{missing[0]} = ..., or give it with --gin."
            ) from error
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{file} is no configuration of a row: {said}") from error
    finally:
        gin.clear_config()


def _required() -> list[str]:
    fields = dataclasses.fields(RowConfig)
    return [field.name for field in fields if field.default is dataclasses.MISSING]
