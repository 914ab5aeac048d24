"""The options of training, measuring, generating and indexing: by keyword in Python, by flag on the command line.

Free of PyTorch until :meth:`Machine.prepare` is called. A task's own options stand in ``task_options``, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kinformer.lab.datastore.options import ListOptions, StoreOptions
from kinformer.lab.tasks.evaluation import EmbeddingSettings, EvaluationSettings, PredictionSettings
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import (
    KinformerError,
    marked,
    nearest,
    require,
    require_above,
    require_seed,
    require_share,
)
from kinformer.runtime.fields import Checked

if TYPE_CHECKING:
    import torch

# The option ``parallel``: how many processes share what, as in ``tp=2,fsdp=4``.


AXES = ("tp", "cp", "ring", "fsdp", "dp")


class Parallel(NamedTuple):
    """``tensor`` processes share the heads, hidden features and vocabulary of every row, ``context`` groups of them its
    time (with ``ring`` by keys and values that go round); ``replicas`` of all that have other rows. With the
    ``strategy`` fsdp, processes that have other tokens share the weights."""

    tensor: int
    replicas: int
    strategy: Literal["ddp", "fsdp"]
    context: int = 1
    ring: bool = False

    @property
    def devices(self) -> int:
        """Return how many processes there are."""
        return self.tensor * self.context * self.replicas


def parallel_of(text: str) -> Parallel:
    """Return what ``text`` says, such as ``tp=2``, ``tp=2,fsdp=2``, ``cp=4`` or ``ring=2,dp=4``."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        if name not in AXES:
            raise KinformerError(f"`parallel` {text}: {name!r} is none of its axes; {nearest(name, AXES)}")
        if name in sizes or not number.isdigit() or int(number) < 1:
            raise KinformerError(
                f"`parallel` {text}: {item.strip()!r} must be {name}=N, once, with N of 1 or more; give it so, as in "
                "tp=2,fsdp=4."
            )
        sizes[name] = int(number)
    if "fsdp" in sizes and "dp" in sizes:
        raise KinformerError(
            f"`parallel` {text}: groups of processes that compute other rows share the weights (fsdp) or do not (dp); "
            "give one of the two."
        )
    if "cp" in sizes and "ring" in sizes:
        raise KinformerError(
            f"`parallel` {text}: processes that share the time of rows gather keys and values (cp) or pass them "
            "on in a ring (ring); give one of the two."
        )
    replicas, context = sizes.get("fsdp", sizes.get("dp", 1)), sizes.get("cp", sizes.get("ring", 1))
    return Parallel(sizes.get("tp", 1), replicas, "fsdp" if "fsdp" in sizes else "ddp", context, "ring" in sizes)


def spread(text: str | None, devices: int) -> dict[str, object]:
    """Return the options that ``parallel`` ``text`` stands for, beside ``devices``; none where it is not
    given."""
    if text is None:
        return {}
    sizes = parallel_of(text)
    if devices not in (1, sizes.devices):
        raise KinformerError(f"`devices` {devices}: `parallel` {text} is {sizes.devices}; leave `devices` out.")
    return {"devices": sizes.devices, "strategy": sizes.strategy}


class Processes:
    """Mixin of options that have ``devices`` and ``parallel``."""

    devices: int
    parallel: str | None

    @property
    def shared(self) -> Parallel:
        """What processes share according to ``parallel``."""
        return Parallel(1, 1, "ddp") if self.parallel is None else parallel_of(self.parallel)

    @property
    def replicas(self) -> int:
        """The number of shares of a batch's rows."""
        return self.devices // (self.shared.tensor * self.shared.context)


MAX_THREADS, MAX_SAMPLES = 1024, 10_000


@dataclass(frozen=True, kw_only=True)
class Machine(Checked):
    """The options of the machine: device and threads."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ... ; auto takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads (PyTorch's own choice if not given)."""

    def __post_init__(self) -> None:
        require("threads", self.threads, 1, MAX_THREADS)
        super().__post_init__()

    def prepare(self, seed: int) -> torch.device:
        """Set the threads, refuse a ``seed`` that PyTorch cannot take, and return the device."""
        import torch

        device = self.usable_device()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        require_seed(seed)
        return device

    def usable_device(self) -> torch.device:
        """Return the device that ``device`` names.

        Errors: ``KinformerError`` for one that this machine does not have.
        """
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.split(":")[0] == "mps":
            raise KinformerError(
                f"`device` {self.device}: has no float64, in which angles of positions and figures are computed; "
                "use cpu or auto."
            )
        if self.device.split(":")[0] == "meta":
            raise KinformerError(f"`device` {self.device}: holds no values to compute with; use cpu or auto.")
        if self.device.split(":")[0] == "cuda" and not torch.cuda.is_available():
            raise KinformerError(f"`device` {self.device}: there is no GPU that PyTorch can use here; use cpu or auto.")
        try:
            device = torch.device(self.device)
            if device.type != "cuda":  # which would begin to use the GPU, also in a process that only starts others
                torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise KinformerError(f"`device` {self.device}: cannot be used here ({reason}); use cpu or auto.") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise KinformerError(
                f"`device` {self.device}: the GPUs here are numbered 0 to {torch.cuda.device_count() - 1}; choose one."
            )
        return device


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Processes, Settings, Machine):
    """Train a member. To resume, what is not given is as it was when the run began. With ``minutes`` and running text,
    it suits the time (see ``lab.runs.minutes``); else that of the recipe's paper, or the default of
    :class:`Settings`."""

    length: int | None = None  # type: ignore[assignment]
    """Tokens that each row of a batch predicts (512, what the model's positions allow, or what suits `minutes`)."""
    batch_size: int | None = None  # type: ignore[assignment]
    """Rows per step, over all processes and all accumulated parts (8, or what suits `minutes`)."""
    optimizer: Literal["adamw", "radam", "muon", "lamb", "adafactor", "adagrad", "sgd"] | None = None  # type: ignore[assignment]
    """Muon takes the layers' matrices and AdamW the rest; adagrad clips each parameter; sgd has `momentum`
    (adamw, or what suits `minutes`)."""
    lr: float | None = None  # type: ignore[assignment]
    """Highest learning rate (0.001, or what suits `minutes`). With `resume`, a new one holds from there on."""
    schedule: Literal["cosine", "linear", "inverse-sqrt", "constant", "plateau"] | None = None  # type: ignore[assignment]
    min_lr_ratio: float | None = None  # type: ignore[assignment]
    warmup: float | None = None  # type: ignore[assignment]
    momentum: float | None = None  # type: ignore[assignment]
    beta2: float | None = None  # type: ignore[assignment]
    clip: float | None = None  # type: ignore[assignment]
    weight_decay: float | None = None  # type: ignore[assignment]
    """Decoupled weight decay of matrices; norms, biases and other vectors have none (0.1, or what suits `minutes`)."""
    average: int | None = None  # type: ignore[assignment]
    validation_tokens: int | None = None  # type: ignore[assignment]
    ema: float | None = None  # type: ignore[assignment]
    """Keep a moving average of the weights instead of the weights themselves. It looks back over about this share of
    the steps so far; 0 turns it off (0, or what suits `minutes`)."""
    precision: Literal["fp32", "bf16-mixed"] | None = None  # type: ignore[assignment]
    """bf16-mixed computes in bfloat16 where that is safe; weights, loss and optimiser stay in float32 (fp32, or with
    `minutes` what is faster)."""
    member: str
    """A member of the family (see: kinformer list)."""
    out: str
    """The run folder: new, or with `resume` an existing one."""
    data: str | None = None
    """What to learn from: a file or folder of text or bytes, token shards (`kinformer pack`), - for standard input,
    several of these with weights, as web=0.7,code=0.3, or stdlib, Python's standard library (the default of tasks of
    text). For classify: a folder per class, or a .csv, .tsv or .jsonl. For image: a folder of pictures, IDX files,
    .npz, or digits."""
    text_field: str | None = None
    """The field with the text in JSON lines, which is written into the run folder; for classify the text's column."""
    task: str | None = None
    """What to train for; if not given, next-token for causal members and mlm for encoders."""
    recipe: str | None = None
    """Which of the member's recipes, see: kinformer show MEMBER (small, or what suits `minutes`)."""
    set: Mapping[str, object] = field(default_factory=dict)
    """A change to the recipe, as in `set` layers.*.dropout=0.1; may be given again."""
    tokenizer: str | None = None
    """bytes, or the path of a tokenizer.json. The default is bytes; with `minutes`, and for translation, a tokenizer
    is trained."""
    train_tokenizer: int | None = None
    """First train a byte-level tokenizer of N tokens on the training data."""
    holdout: float | None = None
    """Hold out the last share of the data for validation, instead of the usual 5 %."""
    init: str | None = None
    """Begin with the model, weights and tokenizer of another run folder, trained or imported. A run of another
    member passes on the weights that fit. A head of another task is replaced by a new one."""
    datastore: str | None = None
    """For a member that looks things up (spalm): a datastore of the training data (see: kinformer index)."""
    retriever: str | None = None
    """With `datastore`: the run that made it. It runs along, frozen, to look things up."""
    neighbours: int | None = None
    """With `datastore`: entries looked up per token (4 if not given)."""
    probes: int | None = None
    """With `datastore`: search approximately, in N of its lists (see: kinformer index --approximate); 0 searches
    exactly. If not given, 8 where it has lists, else exactly."""
    resume: bool = False
    """Continue the run in `out` from its newest checkpoint."""
    devices: int = 1
    """Processes on this machine, one per GPU or, on a CPU, sharing its cores."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: each has the whole model (ddp) or a share of the weights (fsdp)."""
    parallel: str | None = None
    """Instead of `devices` and `strategy`: processes by what they share, as in tp=2,fsdp=4. tp: the heads, hidden
    features and vocabulary of every row; cp: its time (ring: with keys and values that go round); beside them dp
    (copies for other rows) or fsdp (which also share weights)."""
    task_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the task's own, by name."""

    def __post_init__(self) -> None:
        self.settings()
        require("devices", self.devices, 1)
        for name, value in spread(self.parallel, self.devices).items():
            object.__setattr__(self, name, value)
        require("train_tokenizer", self.train_tokenizer, 1)
        require("neighbours", self.neighbours, 1)
        require("probes", self.probes, 0)
        require_share("holdout", self.holdout)
        Machine.__post_init__(self)

    def settings(self) -> Settings:
        """Return the settings that decide the weights, with the defaults of those that are not given."""
        values = {item.name: getattr(self, item.name) for item in fields(Settings)}
        return Settings(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(StoreOptions, EvaluationSettings, Machine):
    """Measure runs of any task on held-out data."""

    set: Mapping[str, object] = field(default_factory=dict)
    """A change that leaves the weights as they are, as in `set` layers.*.mixer.position.scaling=yarn."""
    tune: bool = False
    """With `datastore`: find weight, temperature and neighbours (up to `neighbours`) on the validation split, or on the
    first half of the text where that is the same; the metrics are those of the rest."""
    sizes: str | None = None
    """With `datastore`: also measure with its first N entries, as in 10000,100000."""
    task_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the task's own, by name."""

    def check_store(self) -> None:
        super().check_store()
        if self.tune:
            for name in ("weight", "knn_temperature"):
                if getattr(self, name) is not None:
                    raise KinformerError(f"{marked(name)}: is what `tune` finds; leave one of them out.")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(StoreOptions, Machine):
    """Continue a text, every token written as soon as it is drawn, or draw images."""

    set: Mapping[str, object] = field(default_factory=dict)
    """A change that leaves the weights as they are, as in `set` layers.*.mixer.position.scaling=yarn."""
    max_new_tokens: int | None = None
    """Tokens to draw: 256 if not given, or as many as the model's positions allow."""
    temperature: float | None = None
    """1 draws as the model predicts, 0 always takes the most probable token (0.8 for text, 1 for images)."""
    top_k: int | None = None
    """Draw from the N most probable tokens only."""
    top_p: float | None = None
    """Draw from the fewest tokens whose probability together is X or more."""
    min_p: float | None = None
    """Draw from tokens that are at least X times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens that were there before by X, where they are positive; multiply the others."""
    stop: tuple[str, ...] = ()
    """End before this text appears; may be given again. A text also ends with the model's `input.eos_token`."""
    samples: int = 1
    """Continue the prompt N times, written one after the other when all are done; or draw N images."""
    chunk: int = 1024
    """Tokens of the prompt that the model sees at a time."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights in memory."""
    package: str | None = None
    """Step by the package in this folder, which kinformer export wrote with its format aoti."""
    draft: str | None = None
    """Guess tokens and draw several at once: ngram (looked up in the text), mtp (`set` ahead), or a run's folder."""
    draft_length: int = 4
    """With `draft`: how many tokens are guessed at most."""
    seed: int | None = None
    """The seed of the draws; another one every time if not given."""
    quiet: bool = False
    """Print only the result, without progress or notes."""
    task_options: Any = field(default_factory=dict)  # the task's own options: by name, then as its dataclass

    def __post_init__(self) -> None:
        require("samples", self.samples, 1, MAX_SAMPLES)
        for name in ("max_new_tokens", "top_k", "chunk", "draft_length"):
            require(name, getattr(self, name), 1)
        for name in ("temperature", "seed"):
            require(name, getattr(self, name), 0)
        for name in ("top_p", "min_p"):
            if (value := getattr(self, name)) is not None and not 0 < value <= 1:
                raise KinformerError(f"{marked(name)} is {value:g} but must be above 0 and at most 1.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise KinformerError(
                f"`repetition_penalty` is {self.repetition_penalty:g} but must be above 0; 1 penalises nothing."
            )
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class IndexOptions(ListOptions, Machine):
    """Write what the run makes of every context of a text, and the token that came next, into a datastore; a build that
    was stopped goes on when the same command is given again."""

    datastore: str
    """The datastore: a new folder, or with `append` one that this run made."""
    data: str | None = None
    """The text: a path, - for standard input, or stdlib; the run's own if not given."""
    split: str = "train"
    """Which part of the data: train, validation, test, or all of it."""
    holdout: float | None = None
    """Hold out the last share of the data, instead of the run's."""
    append: bool = False
    """Add the text to what the datastore holds."""
    max_bytes: int | None = None
    """Take the first N bytes only."""
    context: str | None = None
    """Read in windows of N tokens, or with the state carried. If not given, as the run was trained."""
    overlap: float = 0.0
    """The share of each window that is context only: its entries are those of the window before."""
    chunk: int = 4096
    """Tokens computed at a time."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the keys on the disk."""
    seed: int = 0
    """The seed of all random numbers."""

    def __post_init__(self) -> None:
        require("chunk", self.chunk, 1)
        require("max_bytes", self.max_bytes, 2)
        require_seed(self.seed)
        require_share("holdout", self.holdout)
        require_share("overlap", self.overlap, zero=True)
        super().__post_init__()


def require_proof(length: int, limit: float) -> None:
    """Refuse a ``length`` and a ``limit`` to which :func:`kinformer.verify` cannot hold a model."""
    require("length", length, 2, 64)
    require_above("limit", limit, 0)
    require("limit", limit, 0, 1)


# The options of predicting and embedding. Free of PyTorch.


@dataclass(frozen=True, kw_only=True)
class PredictOptions(PredictionSettings, Machine):
    """The options of predicting with a trained run."""

    set: Mapping[str, object] = field(default_factory=dict)
    """A change that leaves the weights as they are, as in `set` layers.*.mixer.position.scaling=yarn."""
    seed: int = 0
    """Decides everything random, such as the hashes of a member that has some."""
    task_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the task's own, by name."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        PredictionSettings.__post_init__(self)
        Machine.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(EmbeddingSettings, Machine):
    """The options of making vectors of texts, images or sounds with a trained run."""

    set: Mapping[str, object] = field(default_factory=dict)
    """A change that leaves the weights as they are, as in `set` layers.*.mixer.position.scaling=yarn."""
    seed: int = 0
    """Decides everything random, such as the hashes of a member that has some."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        EmbeddingSettings.__post_init__(self)
        Machine.__post_init__(self)
