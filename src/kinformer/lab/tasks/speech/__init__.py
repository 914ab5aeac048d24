"""Speech: a model hears sound and writes what is said, by connectionist temporal classification (CTC).

Members of either protocol can do it: encoders hear an utterance as a whole, causal ones write while it is spoken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kinformer.core.model import CausalModel, WholeModel
from kinformer.lab.tasks.evaluation import (
    Embedded,
    EmbeddingSettings,
    Evaluation,
    EvaluationSettings,
    FileSource,
    Predicted,
    PredictionSettings,
)
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import NOTHING, changes_of
from kinformer.lab.tasks.shared.records import FrameInput, input_of, part_of
from kinformer.lab.tasks.task import (
    NOTHING_DRAWN,
    DataNeeds,
    EvaluationNeeds,
    Generation,
    GenerationSettings,
    Models,
    Prediction,
    Source,
    Task,
    TrainingPlan,
)
from kinformer.lab.training.logging import BITS_PER_SYMBOL, ERROR_RATE
from kinformer.runtime.errors import KinformerError, plural, require
from kinformer.runtime.tables import PredictionTable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data.sound import Sound, SoundOptions
    from kinformer.lab.tasks.speech.predict import Transcribed
    from kinformer.lab.training.data_module import DataModule, Objective

# Options of decoding speech with a language model. Free of PyTorch.


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Options of decoding, beside ``prefixes``, how many the beam follows."""

    language_model: str | None = None
    """With `prefixes`: a run of next-token, trained on transcripts, one a line, which guides the search."""
    alpha: float = 0.5
    """With `language_model`: weight of its log-probabilities beside those of the sound."""
    beta: float = 0.0
    """With `language_model`: what every symbol adds to a transcript's score, as the model prefers short ones."""

    def check(self, prefixes: int) -> None:
        """Refuse values that cannot be, and a language model without a beam."""
        require("prefixes", prefixes, 1)
        require("alpha", self.alpha, 0)
        require("beta", self.beta, 0)
        if self.language_model is not None and prefixes == 1:
            raise KinformerError(
                f"`language_model` {self.language_model}: guides a search, but `prefixes` 1 searches nothing; give "
                "`prefixes` 8, or more."
            )

    @property
    def name(self) -> str:
        """Return the language model and its weights in words; "" for none."""
        if self.language_model is None:
            return ""
        return f", language model {self.language_model} with alpha {self.alpha:g} and beta {self.beta:g}"


NAME, INPUT, HEAD = "speech", "frames", "ctc"


@dataclass(frozen=True, kw_only=True)
class SpeechOptions:
    """Options of training on speech."""

    units: Literal["characters", "labels"] | None = None
    """What transcripts are made of: characters, or labels with spaces between them (words, digits, phonemes). If not
    given, characters of a table's transcripts, labels of those in files' names."""
    join: str | None = None
    """Join this many clips of one speaker into an utterance, with pauses of 50 to 300 ms, as in 3-7."""
    test_clips: str | None = None
    """Test on the clips whose names match, as in '*_[0-4].wav'; if nothing says which, on 5 % of them."""
    held_out_speaker: str | None = None
    """Test on this speaker's clips, and train on none of them."""
    sample_rate: int | None = None
    """Samples a second that the model hears, to which others are resampled; that of most clips if not given."""

    augment: str = NOTHING
    """How training utterances are changed at each step: some of speed,specaugment, or none."""

    def __post_init__(self) -> None:
        require("sample_rate", self.sample_rate, 1000)
        _ = self.joined, self.changes

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the names in ``augment``."""
        return changes_of(self.augment, ("speed", "specaugment"))

    @property
    def joined(self) -> tuple[int, int] | None:
        """Return the least and the most clips of an utterance, None where clips are not joined."""
        if self.join is None:
            return None
        least, dash, most = self.join.partition("-")
        if not (least.isdecimal() and (most.isdecimal() or not dash)) or not 1 <= int(least) <= int(most or least):
            raise KinformerError(f"`join` {self.join}: is no range of clips; write as in 3-7.")
        return int(least), int(most or least)

    def reading(self, share: float | None) -> SoundOptions:
        """Return how the data is read; ``share`` is held out of recordings where the options do not say which are."""
        from kinformer.lab.data.sound import Holdout, SoundOptions

        held = Holdout(speaker=self.held_out_speaker, pattern=self.test_clips, share=share)
        return SoundOptions(units=self.units, join=self.joined, rate=self.sample_rate, held=held)


@dataclass(frozen=True, kw_only=True)
class SpeechPredictionOptions(DecodingOptions):
    """Options of predicting transcripts."""

    prefixes: int = 1
    """Search the most probable transcript among N prefixes; 1 follows the most probable path (greedy)."""

    def __post_init__(self) -> None:
        self.check(self.prefixes)


@dataclass(frozen=True, kw_only=True)
class SpeechEvaluationOptions(SpeechPredictionOptions, PredictionTable):
    """Options of evaluating speech recognition."""

    fold: Literal["timit39"] | None = None
    """Count errors after folding phones into classes, for transcripts of phones with spaces between: timit39, TIMIT's
    61 phones into the 39 classes of Lee and Hon (1989)."""

    def __post_init__(self) -> None:
        SpeechPredictionOptions.__post_init__(self)
        PredictionTable.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class SpeechGenerationOptions(DecodingOptions):
    """Options of transcribing sound."""

    audio: str | None = None
    """The sound to write down: a WAV or FLAC file, or - for WAV on standard input, which causal models write down while
    it comes, as in: arecord -f S16_LE -r 16000 | kinformer generate DIR --audio -."""
    prefixes: int = 1
    """Search the most probable transcript among N prefixes, when all is heard; 1 writes at once (greedy)."""

    def __post_init__(self) -> None:
        self.check(self.prefixes)


def _ctc(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.speech.work import CTC

    return CTC()


class Speech(Task):
    """The error rate of transcripts beside that of writing nothing, and of always writing the most frequent one."""

    name = NAME
    title = "speech"
    description = (
        "Learns to write what is said: a folder of WAV or FLAC files with transcripts in a table or in their "
        "names, or telephone tones. Measured by the error rate, by character, label or word, with empty transcripts as "
        "the baseline. Encoders hear whole utterances; causal members write while sound comes."
    )
    models = Models(protocols=(WholeModel, CausalModel), inputs=(INPUT,), from_tokens=True)
    data = DataNeeds(
        default="dtmf",
        refused=dict.fromkeys(
            ("tokenizer", "train_tokenizer", "text_field"),
            "is for text; the symbols of speech are those of its transcripts.",
        ),
    )
    evaluation = EvaluationNeeds(
        refused={"max_bytes": "is for text, not for sound; leave it out.", "seed": NOTHING_DRAWN}
    )
    generation = Generation(prompt=None, reads=(), unread="sound has one transcript, the most probable")
    prediction = Prediction()
    metrics = (ERROR_RATE, BITS_PER_SYMBOL)
    objectives = {"ctc": _ctc}
    Options = SpeechOptions
    EvaluationOptions = SpeechEvaluationOptions
    GenerationOptions = SpeechGenerationOptions
    PredictionOptions = SpeechPredictionOptions

    def fits(self, config: ModelConfig) -> bool:
        return self.takes(config) and config.head.kind == HEAD

    def open(self, source: Source, options: SpeechOptions, cache: Path | None = None) -> Sound:
        from kinformer.lab.data.sound import open_sound

        if source.spec == "stdlib":
            raise KinformerError("`data` stdlib: is text, not speech; give a folder of clips, or leave it out.")
        return open_sound(source.spec, options.reading(source.holdout))

    def fit(self, config: ModelConfig, data: Sound | None) -> dict[str, object]:
        classes = 2 if data is None else 1 + len(data.symbols)
        head: dict[str, object] = {"head": {"kind": HEAD, "classes": classes}}
        if config.head.kind == HEAD:
            head = {"head.classes": classes}
        return head if config.input.kind == INPUT else {"input": {"kind": INPUT}} | head

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.inputs.filterbank import Filterbank
        from kinformer.lab.evaluation.transcripts import jiwer
        from kinformer.lab.tasks.shared.text import check_sequence
        from kinformer.lab.tasks.speech.work import Rows

        jiwer()
        check_sequence(model)
        classes: int = part_of(plan.config.head, "classes")
        input: FrameInput = input_of(plan.config)
        if classes != 1 + len(plan.data.symbols):
            raise KinformerError(
                f"`set` head.classes={classes}: the data has {plural(len(plan.data.symbols), 'symbol')}, and one "
                "class more is the blank; leave it out."
            )
        Filterbank(plan.data.rate, input.mels)
        for split in ("train", "validation"):
            Rows(plan.data, split, plan.config, plan.settings.length).tell_left_out(split)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.speech.work import SpeechRows

        return SpeechRows(plan)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: SpeechEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.speech.work import evaluate

        return evaluate(self, subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Transcribed:
        from kinformer.lab.tasks.speech.predict import transcribe

        if options.task_options.audio is None:
            raise KinformerError(
                "there must be sound to write down; give `audio` FILE, or `audio` - for WAV as it comes."
            )
        return transcribe(subject, options.task_options.audio, options.task_options, write)

    def predict(
        self,
        subject: LoadedRun,
        source: FileSource,
        settings: PredictionSettings,
        task_options: SpeechPredictionOptions,
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.speech.predict import predict

        return predict(subject, source, settings, task_options)

    def embed(self, subject: LoadedRun, source: FileSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
        from kinformer.lab.tasks.speech.predict import embed

        return embed(subject, source, settings)


TASK = Speech()
