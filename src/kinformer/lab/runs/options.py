"""The options of training, measuring, generating and indexing: by keyword in Python, by flag on the command line.

Nothing here imports PyTorch until :meth:`Machine.prepare` is called. None stands for a missing option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from kinformer.lab.datastore.options import ListOptions, StoreOptions
from kinformer.lab.tasks.evaluation import EmbeddingSettings, EvaluationSettings, GenerationSettings, PredictionSettings
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import Checked, KinformerError, marked, nearest, optional, require, require_seed

if TYPE_CHECKING:
    import torch

# The option ``parallel``: the numbers of processes that share rows and weights, as in ``tp=2,fsdp=4``.

AXES = ("tp", "cp", "ring", "fsdp", "dp")


class Parallel(NamedTuple):
    """The mesh of processes: ``tensor`` x ``context`` x ``replicas``.

    tensor: the number of processes that share the heads, hidden features and vocabulary of every row.
    context: the number of groups that share the time of every row.
    ring: whether groups pass keys and values round in a ring; otherwise they gather keys and values.
    replicas: the number of copies, each with different rows.
    strategy: with fsdp, processes with different tokens share the weights.
    """

    tensor: int
    replicas: int
    strategy: Literal["ddp", "fsdp"]
    context: int = 1
    ring: bool = False

    @property
    def devices(self) -> int:
        """Return the number of processes."""
        return self.tensor * self.context * self.replicas

    @property
    def copies(self) -> int:
        """Return how many devices have other tokens of the same part of the model."""
        return self.replicas * self.context

    @property
    def text(self) -> str:
        """Return the mesh as the option ``parallel`` takes it."""
        data = "dp" if self.strategy == "ddp" else self.strategy
        axes = {"tp": self.tensor, "ring" if self.ring else "cp": self.context, data: self.replicas}
        named = [f"{axis}={size}" for axis, size in axes.items() if size > 1 or (axis == "fsdp" and self.context > 1)]
        return ",".join(named) or "dp=1"


def parallel_of(text: str) -> Parallel:
    """Parse ``text``, such as ``tp=2``, ``tp=2,fsdp=2``, ``cp=4`` or ``ring=2,dp=4``, and return its mesh."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        if name not in AXES:
            raise KinformerError(f"`parallel` {text}: {name!r} is none of its axes; {nearest(name, AXES)}")
        if name in sizes or not number.isdigit() or int(number) < 1:
            raise KinformerError(f"`parallel` {text}: {item.strip()!r} must be {name}=N, once, with N of 1 or more.")
        sizes[name] = int(number)
    if "fsdp" in sizes and "dp" in sizes:
        raise KinformerError(f"`parallel` {text}: fsdp shares the weights, and dp does not; give one of the two.")
    if "cp" in sizes and "ring" in sizes:
        raise KinformerError(
            f"`parallel` {text}: cp gathers keys and values, ring passes them on; give one of the two."
        )
    replicas, context = sizes.get("fsdp", sizes.get("dp", 1)), sizes.get("cp", sizes.get("ring", 1))
    return Parallel(sizes.get("tp", 1), replicas, "fsdp" if "fsdp" in sizes else "ddp", context, "ring" in sizes)


def spread(text: str | None, devices: int) -> dict[str, object]:
    """Return the options ``devices`` and ``strategy`` for the option ``parallel``; an empty dictionary without it."""
    if text is None:
        return {}
    sizes = parallel_of(text)
    if devices not in (1, sizes.devices):
        raise KinformerError(f"`devices` {devices}: `parallel` {text} is {sizes.devices}; leave `devices` out.")
    return {"devices": sizes.devices, "strategy": sizes.strategy}


MAX_THREADS = 1024
Weights: TypeAlias = Literal["fp32", "bf16", "int8"]
"""The type of the weights in memory, as in ``generation.weights``."""


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
        """Return the device that ``device`` names."""
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind = self.device.split(":")[0]
        lacking = {"mps": "lacks float64, which positions need", "meta": "does not hold values to compute with"}
        reason = lacking.get(kind)
        if kind == "cuda" and not torch.cuda.is_available():
            reason = "there is no GPU that PyTorch can use here"
        if reason is not None:
            raise KinformerError(f"`device` {self.device}: {reason}; use cpu or auto.")
        try:
            device = torch.device(self.device)
            # On CUDA this check would create a context, also in a process that only starts others.
            if device.type != "cuda":
                torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise KinformerError(f"`device` {self.device}: cannot be used here ({reason}); use cpu or auto.") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise KinformerError(f"`device` {self.device}: the GPUs here are numbered 0 to {last}; choose one.")
        return device


@dataclass(frozen=True, kw_only=True)
class OfTask:
    """The base of options that hold a task's own options."""

    task_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the task's own, by name."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(Machine):
    """The options of every use of a trained run."""

    set: Mapping[str, object] = field(default_factory=dict)
    """A change that leaves the weights unchanged, as in `set` layers.*.mixer.position.scaling=yarn."""


@dataclass(frozen=True, kw_only=True)
class LearningOptions(OfTask, Machine):
    """The options that name the data and the task, for training and comparing."""

    data: str | None = None
    """What to learn from: a file or folder of text or bytes, token shards (`kinformer pack`), - for standard input,
    several of these with weights, as web=0.7,code=0.3, or stdlib, Python's standard library (the default of tasks of
    text). For classify: a folder per class, or a .csv, .tsv or .jsonl. For image: a folder of pictures, IDX files,
    .npz, or digits."""
    task: str | None = None
    """What to train for; if not given, next-token for causal members and mlm for encoders."""
    set: Mapping[str, object] = field(default_factory=dict)
    """A change to the recipe, as in `set` layers.*.dropout=0.1; may be given again."""
    tokenizer: str | None = None
    """bytes, or the path of a tokenizer.json. The default is bytes; training with `minutes`, translation, and
    classification of 100 kB or more train a tokenizer."""
    train_tokenizer: int | None = None
    """First train a byte-level tokenizer of N tokens on the training data."""
    holdout: float | None = None
    """Hold out the last share of the data for validation and test at once, instead of 5 % for each."""

    LEAST = {"train_tokenizer": 1}
    SHARES = {"holdout": "(0, 1)"}


@dataclass(frozen=True, kw_only=True)
@optional(
    "length", "batch_size", "optimizer", "lr", "schedule", "min_lr_ratio", "warmup", "momentum", "beta2", "clip",
    "weight_decay", "average", "validation_tokens", "ema", "precision",
)  # fmt: skip
class TrainOptions(Settings, LearningOptions):
    """Train a member.

    A missing option of a resumed run keeps the run's value. Else ``minutes`` decide it (see ``lab.runs.minutes``),
    then the recipe's paper, then the default of :class:`Settings`.
    """

    member: str = ""
    """A member of the family (see: kinformer list). If not given, the member of the run named by `init`."""
    out: str | None = None
    """The run folder: new, or with `resume` an existing one (runs/MEMBER-N with the smallest free N)."""
    text_field: str | None = None
    """The field with the text in JSON lines, which is written into the run folder; for classify the text's column."""
    recipe: str | None = None
    """Which of the member's recipes, see: kinformer show MEMBER (small, or what suits `minutes`)."""
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
    """Instead of `devices` and `strategy`: numbers of processes, as in tp=2,fsdp=4. tp: processes share the heads,
    hidden features and vocabulary of every row; cp or ring: they share the time of every row (ring: keys and values
    go round); dp: copies have different rows; fsdp: copies have different rows and share the weights."""

    LEAST = {"devices": 1, "neighbours": 1, "probes": 0}  # type: ignore[assignment]

    @property
    def parallelism(self) -> Parallel:
        """The mesh of processes that the options ask for."""
        return Parallel(1, self.devices, self.strategy) if self.parallel is None else parallel_of(self.parallel)

    @property
    def folder(self) -> Path:
        """Return the run folder, which must be named here."""
        if self.out is None:
            raise KinformerError("`out`: is needed to resume a run, and by several machines; give the run folder.")
        return Path(self.out)

    def __post_init__(self) -> None:
        self.settings()
        if self.sample_every and self.devices > 1:
            raise KinformerError(f"`sample_every` {self.sample_every}: one process draws samples; leave it out.")
        for name, value in spread(self.parallel, self.devices).items():
            object.__setattr__(self, name, value)
        LearningOptions.__post_init__(self)
        if self.lora is not None and self.init is None and not self.resume:
            raise KinformerError(f"`lora` {self.lora}: updates the weights of another run; give `init` RUN too.")
        if self.lora is not None and (self.strategy == "fsdp" or self.parallelism.tensor > 1):
            raise KinformerError(f"`lora` {self.lora}: every process holds all weights; give `devices` N alone.")

    def require_processes(self, count: int, reason: str) -> None:
        """Refuse another number of processes than ``count``."""
        if self.devices not in (1, count):
            flag, remedy = f"`devices` {self.devices}", "leave `devices` out"
            if self.parallel is not None:
                flag, remedy = f"`parallel` {self.parallel}", f"give sizes whose product is {count}"
            raise KinformerError(f"{flag}: {reason}; {remedy}.")

    def settings(self) -> Settings:
        """Return the settings of training, with defaults for missing ones."""
        values = {item.name: getattr(self, item.name) for item in fields(Settings)}
        return Settings(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(OfTask, StoreOptions, EvaluationSettings, RunOptions):
    """Measure runs of any task on held-out data."""

    weights: Weights = "fp32"
    """Type of the weights in memory; of bf16 and int8, the metrics of fp32 are reported beside them."""
    tune: bool = False
    """With `datastore`: find weight, temperature and neighbours (up to `neighbours`) on the validation split, or on the
    first half of the text where both are the same; the metrics are measured on the rest."""
    sizes: str | None = None
    """With `datastore`: also measure with its first N entries, as in 10000,100000."""

    def check_store(self) -> None:
        super().check_store()
        if self.datastore is not None and self.weights != "fp32":
            raise KinformerError(
                f"{marked('weights')} {self.weights}: does not go with `datastore`, whose keys are fp32; leave one out."
            )
        if self.tune:
            for name in ("weight", "knn_temperature"):
                if getattr(self, name) is not None:
                    raise KinformerError(f"{marked(name)}: is found by `tune`; leave either out.")


@dataclass(frozen=True, kw_only=True)
@optional("temperature", "seed")
class GenerateOptions(StoreOptions, GenerationSettings, RunOptions):
    """Continue a text and write every token at once, or draw images."""

    weights: Weights = "fp32"
    """Type of the weights in memory; int8 has one scale for each row of a matrix."""
    draft: str | None = None
    """Guess tokens and draw several at once: ngram (looked up in the text), mtp (`set` ahead), or a run's folder."""


@dataclass(frozen=True, kw_only=True)
class IndexOptions(ListOptions, Machine):
    """Write the run's vector of every context of a text, and the token that came next, into a datastore.

    The same options continue a build that was stopped.
    """

    datastore: str
    """The datastore: a new folder, or with `append` one that this run made."""
    data: str | None = None
    """The text: a path, - for standard input, or stdlib; the run's own if not given."""
    split: str = "train"
    """Which part of the data: train, validation, test, or all of it."""
    holdout: float | None = None
    """Hold out the last share of the data, instead of the run's."""
    append: bool = False
    """Add the text to the datastore."""
    first: int | None = None
    """Take the first N bytes only."""
    context: str | None = None
    """Read in windows of N tokens, or with the state carried. If not given, as the run was trained."""
    overlap: float = 0.0
    """The share of each window that serves as context only: its entries belong to the window before."""
    chunk: int = 4096
    """Tokens computed at a time."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the keys on the disk."""
    seed: int = 0
    """The seed of all random numbers."""

    LEAST = {"chunk": 1, "first": 2, "seed": 0}
    SHARES = {"holdout": "(0, 1)", "overlap": "[0, 1)"}


@dataclass(frozen=True, kw_only=True)
class PredictOptions(OfTask, PredictionSettings, RunOptions):
    """The options of predicting with a trained run."""


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(EmbeddingSettings, RunOptions):
    """The options of making vectors of texts, images or sounds with a trained run."""


@dataclass(frozen=True, kw_only=True)
class TraceOptions(RunOptions):
    """The options of tracing a trained run on a text."""

    layers: str | None = None
    """Only these layers, counted from 1, as in 1,4; all if not given."""
    heads: str | None = None
    """Only these heads, counted from 1, as in 1,2; all if not given."""
    target: str | None = None
    """Of a run of the task translate: the translation to trace; the run's own translation if not given."""
    max_tokens: int = 256
    """Trace the first N tokens of the text only: weights take N x N numbers for every head."""
    seed: int = 0
    """Decides all random numbers, such as the hashes of a member with hashing."""

    LEAST = {"max_tokens": 1, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class ServeOptions(RunOptions):
    """The options of a server for a trained run."""

    host: str = "127.0.0.1"
    """Where to listen: this machine alone, or 0.0.0.0 for all of its networks; then give an `api_key` too."""
    port: int = 8000
    """The port; 0 takes a free one."""
    name: str | None = None
    """What clients call the model; the folder's name if not given."""
    max_streams: int = 64
    """Sequences to continue at a time, as one batch."""
    max_state_bytes: int | None = None
    """Bytes that the state of all sequences together may come to hold; half of the memory if not given."""
    max_waiting: int = 64
    """Requests that may wait for their turn; further ones are refused (429)."""
    chunk: int = 256
    """Tokens of prompts to absorb between two steps."""
    chat_template: str | None = None
    """A Jinja template that turns the messages of a chat into a prompt; an imported model's own if not given."""
    chat_stop: tuple[str, ...] = ()
    """End the answer of a chat before this text; may be given again."""
    seed: int | None = None
    """The seed of requests that name none; a new one for each if not given."""
    api_key: str | None = None
    """The key that clients must send, as OpenAI's clients send it; the value of the variable KINFORMER_API_KEY if not
    given, which other users of the machine cannot read. Without either, the server asks for no key."""
    weights: Weights = "fp32"
    """Type of the weights in memory; int8 has one scale for each row of a matrix."""
    quiet: bool = False
    """Print nothing but errors."""

    LEAST = {"max_streams": 1, "max_state_bytes": 1, "chunk": 1, "port": 0, "max_waiting": 0, "seed": 0}

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise KinformerError("`api_key` is empty; give a key, or leave it out.")
        if self.port > 65535:
            raise KinformerError(f"`port` is {self.port} but must be at most 65535.")
        if not all(self.chat_stop):
            raise KinformerError("`chat_stop` is empty; give one character or more, or leave it out.")
        super().__post_init__()
