"""Kinformer: the Transformer family in one library and one command line.

    import kinformer
    kinformer.members()                                      # the family
    model = kinformer.build("linear-transformer", recipe="tiny", vocab_size=256)
    logits, state = model(tokens)                            # tokens [batch, time] int64
    logits, state = model(tokens[:, -1:], state)             # continue with any chunk length
    run = kinformer.train("linear-transformer", data="stdlib", out="runs/linear", steps=500)
    kinformer.evaluate("runs/linear").metrics                # {"bits_per_byte": ...}
    kinformer.predict("runs/reviews", ["A fine film."])      # [{"text": ..., "classes": [...]}]
    vectors = kinformer.embed("runs/linear", ["A text."])    # [texts, dim]
    kinformer.trace("runs/gpt", "A text.").attention[0].weights      # [heads, queries, keys] of the first layer
    model = kinformer.load("runs/linear")                    # a trained run's model, in eval mode
    new = kinformer.generate(model, prompt, max_new_tokens=100, temperature=0.8, seed=1)
    kinformer.estimate("gpt", length=1024, batch_size=8).train_bytes
    kinformer.compare(["gpt", "linear-transformer"], data="stdlib", steps=500).finished
    layer = kinformer.layer("gated-deltanet", dim=512, num_heads=8)     # one layer for a model of your own
    y, state = layer(x, return_state=True)                   # [batch, time, dim] -> the same

Nothing here imports PyTorch before it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinformer.core import config as kind_table
from kinformer.lab.commands import (
    bench,
    calibrate,
    check_shards,
    compare,
    draw,
    embed,
    estimate,
    export,
    import_checkpoint,
    index,
    pack,
    preserving,
    serve,
    show,
    stream,
    trace,
    verify,
)

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Unpack

    import numpy as np
    import torch
    from torch import Tensor

    from kinformer.core.config import Config, Kinds
    from kinformer.core.model import CausalModel
    from kinformer.family.record import Member
    from kinformer.generation.sampling import SamplingOptions
    from kinformer.lab.runs.run import Run
    from kinformer.lab.tasks.evaluation import Evaluation
    from kinformer.lab.tasks.task import Task
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.nn.causal import CausalLayer
    from kinformer.nn.factory import LayerRecord


def _kinds() -> Kinds:
    from kinformer.family.kinds import kinds

    return kinds()


kind_table.find = _kinds
__version__ = "0.2.0"
__all__ = [
    "bench",
    "build",
    "calibrate",
    "check_shards",
    "compare",
    "draw",
    "embed",
    "estimate",
    "evaluate",
    "export",
    "generate",
    "import_checkpoint",
    "index",
    "layer",
    "layers",
    "load",
    "members",
    "open_run",
    "pack",
    "predict",
    "serve",
    "show",
    "stream",
    "tasks",
    "trace",
    "train",
    "verify",
]


def members() -> list[Member]:
    """Return the records of the family, in the order of the table, and then those of other packages."""
    from kinformer.family.table import members

    return members()


def tasks() -> list[Task]:
    """Return the records of the tasks: what a model can be trained for, with name, title, metrics and options."""
    from kinformer.lab.tasks.table import tasks

    return tasks()


def build(
    name: str, *, recipe: str = "small", vocab_size: int | None = None, set: Mapping[str, object] | None = None
) -> Decoder | Encoder:
    """Build a new model, randomly initialised from PyTorch's global generator.

    name: a member of the family (see :func:`members`).
    recipe: which of its recipes; every member has ``tiny``, ``small`` and ``benchmark``, most have ``paper``.
    vocab_size: how many ids the model knows; the recipe's own if not given.
    set: overrides of the recipe by their paths, such as ``{"dim": 256, "layers.*.mixer.num_heads": 8}``.

    A causal member is a ``Decoder``, ``logits, state = model(tokens, state)``; any other an ``Encoder``, ``logits =
    model(tokens, valid=, kinds=)``. An ``EncoderDecoder`` is a ``Decoder`` whose states begin over a source, by
    ``model.begin(source, valid)``.
    """
    from kinformer.family.build import build

    return build(name, recipe, vocab_size, set)


def layer(
    name: str | Config,
    dim: int,
    *,
    block: bool = False,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings: object,
) -> CausalLayer | Any:  # a BidirectionalLayer by the name of an encoder; type checkers then require no check
    """Build one layer of a member for a model of your own: a module [batch, time, dim] -> [batch, time, dim].

        layer = kinformer.layer("gated-deltanet", dim=512, num_heads=8)
        y = layer(x)                                             # a full sequence
        y, state = layer(x, state=None, return_state=True)       # any chunk; see ``kinformer.nn.CausalLayer``

    name: a member or mixer (see :func:`layers`), or a config of parts, such as ``kinformer.nn.SoftmaxAttention(...)``.
    dim: the width.
    block: the member's whole layer, with norms, residuals and feed-forward, instead of its mixer alone.
    recipe: the recipe of the member from which settings come that are not given. Where its number of heads does not
        divide dim, the next smaller one that does is taken.
    settings: those of the mixer by name, such as ``num_heads`` and ``window``; with ``block`` also the layer's. A part
        may be a name (``position="rope"``), a mapping (``pattern={"kind": "local", "window": 64}``) or a config.
    set: settings inside parts by their paths, such as ``{"pattern.window": 64}``.
    device, dtype: of the weights, which are initialised by PyTorch's global generator.

    Positions that a member adds to its tokens, not inside attention, are not part of a layer.

    Errors: ``KinformerError`` for unknown names and settings, and sizes that do not fit each other.
    """
    from kinformer.nn.factory import layer

    return layer(name, dim, block=block, recipe=recipe, set=set, device=device, dtype=dtype, **settings)


def layers() -> list[LayerRecord]:
    """Return the names that :func:`layer` takes, with ``.title``, ``.causal``, ``.growth`` and ``.settings``.

    ``print`` of one shows its settings and their defaults.
    """
    from kinformer.nn.factory import layers

    return layers()


@preserving
def train(
    member: str,
    *,
    out: str | Path,
    data: str | Path | None = None,
    recipe: str | None = None,
    task: str | None = None,
    set: Mapping[str, object] | None = None,
    **options: object,
) -> Run:
    """Train ``member`` as ``kinformer train`` does, and return the run, whose best weights are in the folder ``out``.

    data: a file or folder, or "stdlib" (the default of tasks of text), the sources of Python's standard library.
    recipe, set: the model ("small" if not given), with overrides such as ``{"layers.*.mixer.num_heads": 8}``.
    task: one of :func:`tasks` by name; if not given, the member's usual one.
    options: by the names of the command's flags. With ``minutes`` alone, width, ``length``, ``batch_size``, optimiser
        and tokenizer are chosen so that the time is well spent. Settings: ``steps`` or ``minutes``, ``length``,
        ``batch_size``, ``lr``, ``seed``, ... (see ``lab.training.settings.Settings``). Further ones: ``init``,
        ``tokenizer``, ``resume``, ``devices``, ``device``, ``threads``, ... (see ``lab.runs.options.TrainOptions``). The
        task's own: ``segments``, ``mask_share``, ``examples``, ... And ``quiet=True``: no progress on a terminal.

    Training seeds PyTorch's global random numbers for dropout and restores them at the end. So one
    thread of a process trains at a time, and a second call waits. A thread that draws global numbers during training
    shares them with it; processes share none.

    Errors: ``KinformerError`` with one sentence; an unknown name is one that names the nearest.
    """
    from kinformer.lab.runs.functions import train

    return train(member, {"out": out, "data": data, "recipe": recipe, "task": task, "set": set or {}, **options})


@preserving
def evaluate(run: str | Path, **options: object) -> Evaluation:
    """Measure a run folder on held-out data as its task says: ``.metrics``, ``.units``, ``.baselines``, ``.facts``.

    options: by the names of the flags of ``kinformer evaluate``: ``data``, ``split``, ``max_bytes``, ``set``, ...
        (see ``lab.runs.options.EvaluateOptions``), and the task's own: ``context``, ``lengths``, ``baseline``, ...
    """
    from kinformer.lab.runs.functions import evaluate

    return evaluate(run, options)


@preserving
def predict(run: str | Path, inputs: str | Path | Sequence[object], **options: object) -> list[dict[str, Any]]:
    """Predict with a trained run: a dictionary for every item, in order, as ``kinformer predict --json`` prints them.

        kinformer.predict("runs/reviews", ["A fine film."], top_k=2)
        [{"text": "A fine film.", "classes": [{"class": "good", "probability": 0.98}, ...]}]

    The run's task decides what an item is and what its dictionary holds: ``classes`` of a text or an image, ``masks``
    and the ``filled`` text, the ``text`` of a sound file, the ``translation`` or ``answer`` of a text, the ``actions``
    of an episode.

    run: the run's folder.
    inputs: a list of texts (or of paths, where items are files); or the path of a file or folder, as for the command.
    options: ``top_k`` (1), ``batch_size`` (32), ``max_items``, ``text_field``, ``label_field``, ``format``, ``set``,
        ``device``, ``threads``, ``quiet`` (True; see ``lab.runs.options.PredictOptions``), and the task's own:
        ``mask``, ``beam``, ``prefixes``, ...

    Errors: ``KinformerError`` for a task that predicts nothing, and for an item that cannot be read, with its place.
    """
    from kinformer.lab.runs.functions import predict

    return predict(run, inputs, options)


@preserving
def load(run: str | Path, *, set: Mapping[str, object] | None = None) -> Decoder | Encoder:
    """Load a trained run's model with its best weights, in eval mode, and with its datastore and retriever.

    run: the run's folder.
    set: overrides that leave the weights as they are, such as ``{"layers.*.mixer.position.factor": 4}``.
    """
    from kinformer.lab.runs.functions import load

    return load(run, set)


def open_run(run: str | Path) -> Run:
    """Open a run by its folder: ``member``, ``recipe``, ``config``, ``task`` and its ``options``, ``tokenizer``,
    ``data``, ``training``, ``metrics`` (of the best validation) and ``model()``.

    run: the run's folder.
    """
    from kinformer.lab.runs.run import open_run

    return open_run(run)


def generate(
    model: CausalModel | Decoder | Encoder,
    prompt_tokens: Tensor | np.ndarray | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[Sequence[int]] | None = None,
    valid: Tensor | None = None,
    draft: object = None,
    draft_length: int = 4,
    **sampling: Unpack[SamplingOptions],
) -> Tensor:
    """Continue prompts and return the new tokens [batch, new] int64.

    model: a causal one.
    prompt_tokens: ids [batch, time]: an int64 tensor, a NumPy array, or lists of one length.
    max_new_tokens: the most that are drawn for each row.
    stop: sequences of ids that end a row, as soon as it produced one of them.
    valid: [batch, time] bool, the real tokens of prompts of unlike length.
    draft: "ngram", "mtp" or a smaller model, which guesses ``draft_length`` tokens at most; see ``generation.drafts``.
    sampling: ``temperature`` (1.0; 0 takes the most probable), ``top_k``, ``top_p``, ``min_p``,
        ``repetition_penalty`` (1.0), ``seed``.
    """
    from kinformer.generation.generate import generate

    causal: Any = model
    return generate(
        causal, prompt_tokens, max_new_tokens=max_new_tokens, stop=stop, valid=valid, draft=draft,
        draft_length=draft_length, **sampling,
    )  # fmt: skip
