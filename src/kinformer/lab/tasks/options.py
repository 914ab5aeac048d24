"""The options that only one task has, for training, evaluating, generating and predicting.

The docstring under a field is its help text on the command line. PyTorch is not imported here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from kinformer.lab.tables import PredictionTable
from kinformer.runtime.errors import Checked, KinformerError, choose, marked, require_above
from kinformer.runtime.files import absolute
from kinformer.runtime.parsing import parse_counts

if TYPE_CHECKING:
    from kinformer.lab.data.algorithms import AlgorithmData
    from kinformer.lab.data.mqar import Recall
    from kinformer.lab.data.pairs import Languages
    from kinformer.lab.data.sound import SoundOptions

# Texts.


@dataclass(frozen=True, kw_only=True)
class NextTokenOptions:
    """Options of training models of the next token."""

    segments: bool = False
    """Train on consecutive segments of `length` tokens: the state is carried to the next one, without gradients."""
    reset_documents: bool = False
    """Begin a new sequence at every document in a row: no token sees an earlier document. `segments` always does."""

    def __post_init__(self) -> None:
        if self.segments and self.reset_documents:
            raise KinformerError("`reset_documents`: `segments` begin a new sequence at every document; leave one out.")


@dataclass(frozen=True, kw_only=True)
class InstructOptions:
    """Options of training on answers to instructions."""

    chat_template: str | None = None
    """The chat template of the conversations: a file of Jinja, or chatml. If not given, the template of the run named
    by `init`. The run keeps it for chat and serve."""


@dataclass(frozen=True, kw_only=True)
class NextTokenEvaluationOptions(Checked):
    """Options of evaluating models of the next token."""

    context: str | None = None
    """Measure in windows of N tokens, or with the state carried from end to end (N or "carried"). If not given, as it
    was trained: carried after training with `segments`, else in windows of the training length."""
    overlap: float = 0.0
    """The share of each window that repeats the one before and is not scored again."""
    contexts: str | None = None
    """Also measure in windows of each of these lengths and by position within them, as in 128,512,2048, or 1x,4x,16x
    for multiples of the training length. A length beyond a model's positions is left out."""
    plot: str | None = None
    """Draw what `contexts`, `recl` or `datastore` measured, as PNG or SVG by the ending of this name."""
    recl: bool = False
    """Measure the relative effective context length of a group of runs instead; `contexts` are the contexts tried."""
    hardest: float = 0.1
    """With `recl`: the share of tokens that count: the tokens that the shorter context explains least."""
    positions: int = 512
    """With `recl`: how many tokens are predicted, evenly spread, each again at every context."""
    holdout: float | None = None
    """Take the last share of the data for validation and test, instead of the run's."""
    baseline: bool = False
    """Also count 5-grams of the training split and measure their prediction."""
    harness: str | None = None
    """Instead do these tasks of lm-evaluation-harness, by name or as YAML files, as in blimp,own/task.yaml."""
    fewshot: int | None = None
    """With `harness`: N examples before every question (the task's own number if not given)."""

    LEAST = {"positions": 1, "fewshot": 0}
    SHARES = {"overlap": "[0, 1)", "holdout": "(0, 1)", "hardest": "(0, 1]"}

    def __post_init__(self) -> None:
        for option in fields(self):
            if getattr(self, option.name) == option.default:
                continue
            if option.name in ("hardest", "positions") and not self.recl:
                raise KinformerError(f"{marked(option.name)}: says how `recl` is measured; give `recl` too.")
            if option.name == "fewshot" and self.harness is None:
                raise KinformerError(f"{marked(option.name)}: is for tasks of a harness; give `harness` TASKS too.")
            if option.name not in ("context", "harness", "fewshot") and self.harness is not None:
                raise KinformerError(f"{marked(option.name)}: means nothing to tasks of a `harness`; leave it out.")
            if option.name in ("context", "overlap", "baseline") and self.recl:
                raise KinformerError(f"{marked(option.name)}: does not go together with `recl`; leave one out.")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class MlmOptions(Checked):
    """Options of masked language modelling."""

    mask_share: float = 0.15
    """The share of all tokens to predict."""
    whole_words: bool = False
    """All tokens of a word are masked together."""

    SHARES = {"mask_share": "(0, 1)"}


@dataclass(frozen=True, kw_only=True)
class MaskPredictionOptions:
    """Options of predicting masked tokens."""

    mask: str = "[MASK]"
    """The text that marks a masked token."""

    def __post_init__(self) -> None:
        if not self.mask:
            raise KinformerError("`mask` is empty but must be what stands for a masked token, such as [MASK].")


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Options of training on classification."""

    label_field: str | None = None
    """The column or field with the class, in a table whose columns are not called label and text."""


@dataclass(frozen=True, kw_only=True)
class TranslateOptions(Checked):
    """Options of training on translation."""

    source: str | None = None
    """The language to translate from: the ending of its files, or the name of its column (English if it is there)."""
    target: str | None = None
    """The language to translate into."""
    label_smoothing: float = 0.1
    """The share of the probability that training spreads over all ids."""

    SHARES = {"label_smoothing": "[0, 1)"}

    @property
    def languages(self) -> Languages:
        """Return the languages that these options name."""
        from kinformer.lab.data.pairs import Languages

        return Languages(self.source, self.target)


@dataclass(frozen=True, kw_only=True)
class BeamOptions(Checked):
    """Options of searching for translations with a beam."""

    beam: int = 4
    """How many translations of a sentence are followed; 1 always takes the most probable token."""
    length_penalty: float = 0.6
    """The exponent by which long translations are preferred; 0 prefers short ones."""

    LEAST = {"beam": 1, "length_penalty": 0}


@dataclass(frozen=True, kw_only=True)
class Decoding(BeamOptions):
    """Options of translating a text."""

    batch_size: int = 32
    """Sentences to translate at a time; bounds the memory, does not change the result."""

    LEAST = {"batch_size": 1}


@dataclass(frozen=True, kw_only=True)
class TranslateEvaluationOptions(Decoding, PredictionTable):
    """Options of evaluating translation."""


# Data that a task makes.


def whole_numbers(flag: str, text: str, of: str, example: str) -> tuple[int, ...]:
    """``"4,8"`` as distinct numbers above 0, in order: numbers ``of`` something."""
    try:
        return tuple(parse_counts(text))
    except ValueError:
        raise KinformerError(f"{flag} {text}: does not list numbers of {of}; write as in {example}.") from None


def range_in(option: str, text: str, of: str, example: str, first: int = 1) -> tuple[int, int]:
    """Return the ends of a range of numbers ``of`` something from ``first`` on, as in ``"3-7"`` or ``"3"``."""
    least, dash, most = text.partition("-")
    fine = least.isdecimal() and (most.isdecimal() or not dash)
    if not fine or not first <= int(least) <= int(most or least):
        raise KinformerError(f"{marked(option)} {text}: is not a range of {of}; write as in {example}.")
    return int(least), int(most or least)


@dataclass(frozen=True, kw_only=True)
class RecallOptions(Checked):
    """Options of training on recall."""

    pairs: str = "4,8,16"
    """How many keys and values a row of `length` tokens has: one of these numbers, drawn for every row."""
    symbols: int = 256
    """How many tokens there are; keys come from the lower half, values from the upper half."""
    gap_power: float = 0.01
    """Queries come after i pairs of tokens with a probability as i to the power of this less 1: most come soon."""
    zero_fillers: bool = False
    """Zeros stand between queries, instead of random tokens."""

    LEAST = {"symbols": 4}

    def __post_init__(self) -> None:
        _ = self.numbers_of_pairs
        require_above("gap_power", self.gap_power, 0)
        super().__post_init__()

    @property
    def numbers_of_pairs(self) -> tuple[int, ...]:
        """Return the numbers in ``pairs``."""
        return whole_numbers("`pairs`", self.pairs, "pairs", "4,8,16")

    @property
    def data(self) -> Recall:
        """Return the rows that these options describe."""
        from kinformer.lab.data.mqar import Recall

        pairs, fillers = self.numbers_of_pairs, not self.zero_fillers
        return Recall(pairs=pairs, symbols=self.symbols, gap_power=self.gap_power, random_fillers=fillers)


@dataclass(frozen=True, kw_only=True)
class RecallEvaluationOptions(PredictionTable):
    """Options of evaluating recall."""

    at_pairs: str | None = None
    """Measure rows of these numbers of pairs instead of the trained ones, as in 4,8,16,32."""
    rows: int = 512
    """How many rows of each number of pairs are measured."""

    LEAST = {"rows": 1}

    def __post_init__(self) -> None:
        _ = self.pairs_to_measure
        super().__post_init__()

    @property
    def pairs_to_measure(self) -> tuple[int, ...] | None:
        """Return the numbers of ``at_pairs``."""
        return None if self.at_pairs is None else whole_numbers("`at_pairs`", self.at_pairs, "pairs", "4,8,16")


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """Options of training on algorithms."""

    algorithm: Literal["copy", "reverse", "addition", "parity"] = "copy"
    """What is computed: 407=407, 407=704, 407+950=592 (the lowest digit first), or of bits 0110=0."""
    digits: str = "1-20"
    """How many digits a problem has, drawn from this range with both ends; in an addition, each number has as many.
    Rows are as long as the longest problem and its answer; `length` is the longest row allowed."""

    def __post_init__(self) -> None:
        _ = self.bounds

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the ends of the range of ``digits``."""
        return range_in("digits", self.digits, "numbers from 1", "1-20")

    @property
    def data(self) -> AlgorithmData:
        """Return the rows that these options describe."""
        from kinformer.lab.data.algorithms import AlgorithmData

        least, most = self.bounds
        return AlgorithmData(algorithm=self.algorithm, least=least, most=most)


@dataclass(frozen=True, kw_only=True)
class AlgorithmEvaluationOptions(PredictionTable):
    """Options of evaluating algorithms."""

    at_digits: str | None = None
    """Measure problems of these numbers of digits, as in 10,20,40, instead of up to four times training's longest."""
    problems: int = 256
    """How many problems of each number of digits are measured."""

    LEAST = {"problems": 1}

    def __post_init__(self) -> None:
        _ = self.digits_to_measure
        super().__post_init__()

    @property
    def digits_to_measure(self) -> tuple[int, ...] | None:
        """Return the numbers of ``at_digits``."""
        return None if self.at_digits is None else whole_numbers("`at_digits`", self.at_digits, "digits", "10,20,40")


@dataclass(frozen=True, kw_only=True)
class ListOpsOptions(Checked):
    """Options of training on ListOps."""

    examples: int = 96_000
    """Lists to train on."""
    example_tokens: str = "500-2000"
    """How many tokens a list has: more than the first number and fewer than the second."""

    LEAST = {"examples": 8}

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.bounds

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the range of tokens as numbers."""
        return range_in("example_tokens", self.example_tokens, "numbers of tokens", "500-2000", first=0)


# Images.

NOTHING = "none"


def changes_of(augment: str, valid_names: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``augment``, such as ``crop,flip``; refuse names outside ``valid_names``."""
    names = () if augment == NOTHING else tuple(augment.split(","))
    for name in names:
        choose(name, (*valid_names, NOTHING), "`augment`")
    return names


@dataclass(frozen=True, kw_only=True)
class PictureOptions(Checked):
    """Options of training on images."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""

    LEAST = {"resize": 1}


@dataclass(frozen=True, kw_only=True)
class PatchOptions(PictureOptions):
    """Options of training on patches, whose changes are the ``CHANGES``."""

    augment: str = NOTHING
    """How training images are changed at each step: some of crop,resized-crop,flip, or none. Digits and letters must
    not be flipped."""

    CHANGES: ClassVar[tuple[str, ...]] = ("crop", "resized-crop", "flip")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.augmentations

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Return the names in ``augment``."""
        return changes_of(self.augment, self.CHANGES)


@dataclass(frozen=True, kw_only=True)
class ImageOptions(PictureOptions):
    """Options of training on images."""

    conditional: bool = False
    """Tell the model the class of every image, so that it draws images of a class; for images with labels."""


@dataclass(frozen=True, kw_only=True)
class ImageEvaluationOptions:
    """Options of evaluating models of images."""

    without_first: bool = False
    """Leave the first value of every image unscored, as the Linear Transformer's code does."""


@dataclass(frozen=True, kw_only=True)
class ImageGenerationOptions(Checked):
    """Options of generating images."""

    out: str | None = None
    """The PNG to write, a grid of `samples` images (samples.png in the run folder)."""
    complete: str | None = None
    """Complete images: a PNG or JPEG, or the first test images of data as `data` takes it."""
    rows: int | None = None
    """With `complete`: how many rows from the top are kept (half if not given)."""
    occluded: int = 8
    """With `complete`: how many images of the data are completed, `samples` times each."""
    label: str | None = None
    """Of a run trained with `conditional`: the class, or classes a,b,c, of the images, in turns. If not given, all
    classes in turns, or the classes of the images to complete."""

    LEAST = {"rows": 0, "occluded": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and self.complete is None:
            raise KinformerError(
                f"`rows` {self.rows}: says how many rows of an image are kept; give `complete` FILE too."
            )
        if self.occluded != ImageGenerationOptions.occluded and self.complete is None:
            raise KinformerError(f"`occluded` {self.occluded}: says how many are completed; give `complete` DATA too.")


@dataclass(frozen=True, kw_only=True)
class SuperResolutionOptions(PictureOptions):
    """Options of training on small images and large ones."""

    factor: int = 4
    """How many times as many pixels on a side the drawn image has: 4 makes 32 x 32 of 8 x 8."""

    LEAST = {"factor": 2}


@dataclass(frozen=True, kw_only=True)
class SuperResolutionGenerationOptions(Checked):
    """Options of enlarging images."""

    image: str | None = None
    """The pictures to enlarge: a PNG or JPEG, or a folder of pictures, each of the size that the model reads, or of
    another size and made smaller first; or data as `data` takes it, whose first test images are made smaller (the run's
    own)."""
    out: str | None = None
    """The PNG to write: a line for every picture, which begins with it, then `samples` drawn images, then the large
    image, where there is one (enlarged.png in the run folder)."""
    enlarged: int = 8
    """How many test images of data are enlarged, `samples` times each."""

    LEAST = {"enlarged": 1}


AUGMENTATIONS = ("crop", "resized-crop", "flip", "jitter", "randaugment", "erasing", "mixup", "cutmix")


@dataclass(frozen=True, kw_only=True)
class VisionOptions(PatchOptions):
    """Options of training on image classification."""

    augment: str = NOTHING
    """How training images are changed at each step: some of crop,resized-crop,flip,jitter,randaugment,erasing,mixup,
    cutmix, or none. Digits and letters must not be flipped."""
    repeats: int = 1
    """How often an image stands in a row of a batch, changed differently each time (repeated augmentation; DeiT: 3)."""
    smoothing: float = 0.0
    """Label smoothing: the share of a target to spread over all classes."""
    label_share: float = 1.0
    """Learn from this share of the training images only, the same of each class."""

    teacher: str | None = None
    """A run of this task on the same classes, whose predictions are learnt beside the labels (distillation); the member
    deit learns them by a separate token."""
    distillation: Literal["hard", "soft"] = "hard"
    """With `teacher`: learn the class that it finds most probable, or its probabilities."""
    distillation_weight: float = 0.5
    """With `teacher`: its share of the loss."""
    distillation_temperature: float = 3.0
    """With `distillation` soft: the divisor of the teacher's and the student's logits."""

    CHANGES = AUGMENTATIONS
    LEAST = {"repeats": 1}
    SHARES = {"smoothing": "[0, 1)", "label_share": "(0, 1]", "distillation_weight": "[0, 1]"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats > 1 and not self.augmentations:
            raise KinformerError(
                f"`repeats` {self.repeats}: gives the same image again where `augment` changes none; give that too, or "
                "`repeats` 1."
            )
        if self.teacher is not None:
            object.__setattr__(self, "teacher", str(absolute(self.teacher)))
        require_above("distillation_temperature", self.distillation_temperature, 0)
        for name, needs, idle in (
            ("distillation", "`teacher` RUN", self.teacher is None),
            ("distillation_weight", "`teacher` RUN", self.teacher is None),
            ("distillation_temperature", "`distillation` soft", self.distillation == "hard" or self.teacher is None),
        ):
            if idle and getattr(self, name) != getattr(VisionOptions, name):
                raise KinformerError(f"{marked(name)}: does nothing without {needs}; give that too, or leave it out.")


@dataclass(frozen=True, kw_only=True)
class VisionGenerationOptions(Checked):
    """Options of classifying images."""

    image: str | None = None
    """The image to classify: a PNG or JPEG of any size, a folder of pictures, or the first `samples` test images of
    data as `data` takes it."""
    classes: int = 5
    """How many of the most probable classes are shown."""

    LEAST = {"classes": 1}


@dataclass(frozen=True, kw_only=True)
class DinoOptions(PictureOptions):
    """Options of training by self-distillation."""

    level: int = 1
    """Which encoder of a pyramid (hipt) learns, counted from below; encoders below it are frozen, so begin the second
    with `init`, the run of the first."""
    prototypes: int = 1024
    """Over how many classes, which the model finds itself, views are spread (65536 in the paper)."""
    local_views: int = 8
    """Small views of every image, beside the two large ones."""
    area: float = 0.4
    """Large views of pixels show this share of an image's area or more, small ones from 5 % up to it. Of images of few
    pixels much has to be seen for a view to predict another: 0.8, without small views."""
    flip: bool = False
    """Half of the views are mirrored. Digits and letters must not be mirrored."""
    teacher_momentum: float = 0.996
    """The teacher's weights are a running mean of the student's, with this share of the old weights at the
    beginning of training, which rises to all at the end."""
    teacher_temperature: float = 0.04
    """The divisor of the teacher's logits, the lower the sharper; the student's divisor is 0.1."""

    LEAST = {"level": 1, "prototypes": 2, "local_views": 0}
    SHARES = {"teacher_momentum": "[0, 1]"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.05 <= self.area <= 1:
            raise KinformerError(f"`area` is {self.area:g} but must lie between 0.05 and 1.")
        require_above("teacher_temperature", self.teacher_temperature, 0)


@dataclass(frozen=True, kw_only=True)
class DinoEvaluationOptions(Checked):
    """Options of evaluating self-distillation."""

    nearest: int = 20
    """How many of the nearest training images decide the class of an image."""

    LEAST = {"nearest": 1}


@dataclass(frozen=True, kw_only=True)
class MaeOptions(PatchOptions):
    """Options of training on masked patches."""

    masked: float = 0.75
    """The share of an image's patches that the encoder does not see."""
    raw_pixels: bool = False
    """Predict raw pixels, instead of each patch's deviations from its mean in units of its standard deviation."""

    SHARES = {"masked": "(0, 1)"}


@dataclass(frozen=True, kw_only=True)
class MaeGenerationOptions:
    """Options of completing images from some of their patches."""

    image: str | None = None
    """The image to complete: a PNG or JPEG of any size, a folder of pictures, or the first `samples` test images of
    data as `data` takes it (the run's own data)."""
    out: str | None = None
    """The PNG to write: for every image its visible patches, the completed image, and the image itself (completed.png
    in the run folder)."""


@dataclass(frozen=True, kw_only=True)
class MppOptions(PatchOptions):
    """Options of training on the colours of corrupted patches."""

    corrupted: float = 0.5
    """The share of an image's patches to corrupt; their colours are predicted: 80 % are masked, 10 % are another patch
    of the image, and 10 % are unchanged."""

    SHARES = {"corrupted": "(0, 1]"}


# Sound.


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(Checked):
    """Decode with a language model beside the sound."""

    language_model: str | None = None
    """With `prefixes`: a run of next-token, trained on transcripts, one a line, which guides the search."""
    alpha: float = 0.5
    """With `language_model`: weight of its log-probabilities beside the log-probabilities of the sound."""
    beta: float = 0.0
    """With `language_model`: what every symbol adds to a transcript's score, as the model prefers short transcripts."""

    prefixes: int = 1
    """Search the most probable transcript among N prefixes; 1 follows the most probable path (greedy)."""

    LEAST = {"prefixes": 1, "alpha": 0, "beta": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.language_model is not None and self.prefixes == 1:
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


@dataclass(frozen=True, kw_only=True)
class SpeechOptions(Checked):
    """Options of training on speech."""

    units: Literal["characters", "labels"] | None = None
    """The symbols of transcripts: characters, or labels with spaces between them (words, digits, phonemes). If not
    given, characters for the transcripts of a table, and labels for transcripts in files' names."""
    join: str | None = None
    """Join this many clips of one speaker into an utterance, with pauses of 50 to 300 ms, as in 3-7."""
    test_clips: str | None = None
    """Test on the clips whose names match, as in '*_[0-4].wav'; if no option chooses the clips, on 5 %."""
    held_out_speaker: str | None = None
    """Test on this speaker's clips, and do not train on them."""
    sample_rate: int | None = None
    """Samples a second that the model hears; other clips are resampled. If not given, the rate of most clips."""

    augment: str = NOTHING
    """How training utterances are changed at each step: some of speed,specaugment, or none."""

    LEAST = {"sample_rate": 1000}

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.joined, self.changes

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the names in ``augment``."""
        return changes_of(self.augment, ("speed", "specaugment"))

    @property
    def joined(self) -> tuple[int, int] | None:
        """Return the least and the most clips of an utterance, None where clips are not joined."""
        return None if self.join is None else range_in("join", self.join, "clips", "3-7")

    def reading(self, share: float | None) -> SoundOptions:
        """Return how the data is read; ``share`` is held out of recordings where the options do not say which are."""
        from kinformer.lab.data.sound import SoundOptions

        return SoundOptions(
            units=self.units,
            join=self.joined,
            rate=self.sample_rate,
            speaker=self.held_out_speaker,
            pattern=self.test_clips,
            share=share,
        )


@dataclass(frozen=True, kw_only=True)
class SpeechPredictionOptions(DecodingOptions):
    """Options of predicting transcripts."""


@dataclass(frozen=True, kw_only=True)
class SpeechEvaluationOptions(SpeechPredictionOptions, PredictionTable):
    """Options of evaluating speech recognition."""

    fold: Literal["timit39"] | None = None
    """Count errors after folding phones into classes, for transcripts of phones with spaces between: timit39, TIMIT's
    61 phones into the 39 classes of Lee and Hon (1989)."""


@dataclass(frozen=True, kw_only=True)
class SpeechGenerationOptions(DecodingOptions):
    """Options of transcribing sound."""

    audio: str | None = None
    """The sound to write down: a WAV or FLAC file, or - for WAV on standard input, which causal models write down while
    it comes, as in: arecord -f S16_LE -r 16000 | kinformer generate DIR --audio -."""
    prefixes: int = 1
    """Search the most probable transcript among N prefixes, when all is heard; 1 writes at once (greedy)."""
