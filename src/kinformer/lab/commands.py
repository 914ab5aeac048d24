"""The functions of the package that correspond to commands. PyTorch is imported when a function first needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kinformer.runtime.errors import KinformerError, nearest, require_kind, require_list, require_types, today

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from kinformer.lab.calibration.calibrate import Calibrated, SearchResult
    from kinformer.lab.comparison.bench import Bench
    from kinformer.lab.comparison.record import Comparison
    from kinformer.lab.data.packed import Packed
    from kinformer.lab.drawing.subject import Drawing
    from kinformer.lab.runs.describe import Description, MemberEstimate
    from kinformer.lab.runs.exporting import Exported, ExportedGraph
    from kinformer.lab.runs.importing import ImportedRun, Proof
    from kinformer.lab.runs.index import Indexed
    from kinformer.lab.runs.run import Run
    from kinformer.lab.runs.trace import Trace
    from kinformer.lab.tasks.evaluation import Evaluation
    from kinformer.lab.tasks.table import OptionKind
    from kinformer.lab.tasks.task import Task
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder


P = ParamSpec("P")
R = TypeVar("R")
O = TypeVar("O")


def preserving(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper of ``function`` that restores the caller's threads and precision of products at the end."""

    @wraps(function)
    def preserved(*arguments: P.args, **options: P.kwargs) -> R:
        from kinformer.runtime import process

        with process.preserved():
            return function(*arguments, **options)

    return preserved


def request(kind: type[O], options: Mapping[str, object], function: str, tasks: OptionKind | None = None) -> O:
    """Return the ``options`` of ``kinformer.<function>`` as the dataclass ``kind``.

    The options of a task go into ``task_options``. A path becomes text. A list becomes text if the field of ``kind``
    is text, as in ``lengths=[128, 512]``.

    Errors: ``KinformerError`` for an unknown name, and for a value of a wrong type.
    """
    from kinformer.lab.tasks.table import option_names

    texts = {option.name for option in fields(kind) if option.type in ("str", "str | None")}  # type: ignore[arg-type]
    general = {option.name for option in fields(kind)} - {"task_options"}  # type: ignore[arg-type]
    of_tasks = {} if tasks is None else option_names(tasks)
    options = {today(name, general | of_tasks.keys()): value for name, value in options.items()}
    for name in options:
        if name not in general and name not in of_tasks:
            names = sorted(general | of_tasks.keys())
            raise KinformerError(f"kinformer.{function}: {name!r} is not an option; {nearest(name, names)}")
    values = {name: _text(value, name in texts) for name, value in options.items()}
    if tasks is not None:
        values["task_options"] = {name: values.pop(name) for name in list(values) if name not in general}
    require_types(SimpleNamespace(**values), kind, values)
    return kind(**values)


def _text(value: object, is_text: bool) -> object:
    if isinstance(value, list | tuple) and is_text:
        return ",".join(map(str, value))
    return str(value) if isinstance(value, Path) else value


def tasks() -> list[Task]:
    """Return the records of the tasks, with name, title, metrics and options."""
    from kinformer.lab.tasks.table import tasks

    return tasks()


def register(thing: O) -> O:
    """Add a part, a member or a task of your own to the tables of Kinformer, and return it.

        @kinformer.register
        @dataclass(frozen=True, kw_only=True)
        class Config(MixerConfig):
            kind = "min_gru"
            ...

        kinformer.train("gpt", out="runs/mine", set={"layers.*.mixer": "min_gru"})

    The name is valid until the process ends: in ``set``, in saved runs, in lists and on the command line, where
    ``--import FILE.py`` first runs a file that registers its objects. A saved run names the objects that it needs and
    never runs their code by itself. A second object of the same name replaces the first. A package adds names for all
    programs by entry points instead.

    thing: a config class with a slot and a kind (mixers, positions, patterns, ...), a ``family.record.Member``, or a
        ``lab.tasks.task.Task``.

    Errors: ``KinformerError`` for another object, and for a name that Kinformer itself has.
    """
    from kinformer.core.config import Config
    from kinformer.family.kinds import kinds
    from kinformer.family.record import Member
    from kinformer.family.table import FAMILY
    from kinformer.lab.tasks.table import ALL
    from kinformer.lab.tasks.task import Task

    added: Any = thing
    if isinstance(added, Member | Task):
        table: Any = FAMILY if isinstance(added, Member) else ALL
        table.register(added.name, added)
    elif isinstance(added, type) and issubclass(added, Config) and added.slot in kinds():
        kinds()[added.slot].register(added.kind, added)
    else:
        raise KinformerError(f"register: {thing!r} is not a config class with a slot, a Member or a Task; give one.")
    return thing


@preserving
def train(
    member: str = "",
    *,
    out: str | Path | None = None,
    data: str | Path | None = None,
    recipe: str | None = None,
    task: str | None = None,
    set: Mapping[str, object] | None = None,
    **options: object,
) -> Run:
    """Train ``member`` as ``kinformer train`` does, and return the run, whose best weights are in the folder ``out``
    (``runs/<member>-<n>`` with the smallest free n if not given).

    member: a member of the family; if not given, the member of the run named by ``init``.
    data: a file or folder, or "stdlib" (the default of tasks of text), the sources of Python's standard library.
    recipe, set: the recipe ("small" if not given), and overrides such as ``{"layers.*.mixer.num_heads": 8}``.
    task: the name of a task (see :func:`tasks`); the member's usual task if not given.
    options: by the names of the command's flags. With ``minutes`` alone, width, ``length``, ``batch_size``, optimiser
        and tokenizer are chosen so that the time is well spent. Settings: ``steps`` or ``minutes``, ``length``,
        ``batch_size``, ``lr``, ``seed``, ... (see ``lab.training.settings.Settings``). Further options: ``init``,
        ``tokenizer``, ``resume``, ``devices``, ``device``, ``threads``, ... (see ``lab.runs.options.TrainOptions``).
        Options of the task: ``segments``, ``mask_share``, ``examples``, ... ``quiet=True``: no progress on a terminal.

    Training seeds PyTorch's global random numbers for dropout and restores them at the end. So only one thread of a
    process trains at a time, and a second call waits. Another thread that draws global random numbers during training
    changes the numbers of the training; other processes do not.

    Errors: ``KinformerError`` with one sentence; for an unknown name the sentence recommends the nearest name.
    """
    from kinformer.lab.runs import train as training
    from kinformer.lab.runs.options import TrainOptions

    quiet = bool(options.pop("quiet", False)) or not sys.stderr.isatty()
    named = {"member": member, "out": out, "data": data, "recipe": recipe, "task": task, "set": set or {}}
    try:
        summary = training.train(request(TrainOptions, named | options, "train", "Options"), quiet)
    except InterruptedError:
        raise KeyboardInterrupt from None
    if summary.result.signal:
        raise KeyboardInterrupt
    return open_run(summary.folder)


@preserving
def evaluate(run: str | Path, **options: object) -> Evaluation:
    """Measure a run folder on held-out data by the run's task: ``.metrics``, ``.units``, ``.baselines``, ``.facts``.

    options: by the names of the flags of ``kinformer evaluate``: ``data``, ``split``, ``first``, ``set``, ...
        (see ``lab.runs.options.EvaluateOptions``), and options of the task: ``context``, ``lengths``, ``baseline``, ...
    """
    from kinformer.lab.runs.inference import evaluate
    from kinformer.lab.runs.options import EvaluateOptions

    quiet = bool(options.pop("quiet", False))
    return evaluate([run], request(EvaluateOptions, options, "evaluate", "EvaluationOptions"), quiet).evaluations[0]


@preserving
def predict(run: str | Path, inputs: str | Path | Sequence[object], **options: object) -> list[dict[str, Any]]:
    """Predict with a trained run, and return a dictionary for every item, in order.

    ``kinformer predict --json`` prints the same dictionaries.

        kinformer.predict("runs/reviews", ["A fine film."], top_k=2)
        [{"text": "A fine film.", "classes": [{"class": "good", "probability": 0.98}, ...]}]

    The run's task decides the kind of items and the keys of dictionaries: ``classes`` of a text or an image, ``masks``
    and the ``filled`` text, the ``text`` of a sound file, the ``translation`` or ``answer`` of a text, or the
    ``actions`` of an episode.

    run: the run's folder.
    inputs: a list of texts (or of paths, if items are files); or the path of a file or folder, as for the command.
    options: ``top_k`` (1), ``batch_size`` (32), ``first``, ``text_field``, ``label_field``, ``format``,
        ``skip_bad``, ``set``, ``device``, ``threads``, ``quiet`` (True; see ``lab.runs.options.PredictOptions``), and
        options of the task: ``mask``, ``beam``, ``prefixes``, ...

    Errors: ``KinformerError`` for a task that predicts nothing, and for an item that cannot be read, with its place.
    """
    from kinformer.lab.runs.inference import predictions
    from kinformer.lab.runs.options import PredictOptions

    requested = request(PredictOptions, {"quiet": True, **options}, "predict", "PredictionOptions")
    return [dict(predicted.row) for predicted in predictions(run, inputs, requested)]


@preserving
def load(run: str | Path, *, set: Mapping[str, object] | None = None, weights: str = "fp32") -> Decoder | Encoder:
    """Load a trained run's model with its best weights, in eval mode, and with its datastore and retriever.

    run: the run's folder.
    set: overrides that change no weight, such as ``{"layers.*.mixer.position.factor": 4}``.
    weights: the type of the weights in memory, "fp32", "bf16" or "int8"; 8-bit weights are for inference only.
    """
    from kinformer.generation.weights import as_weights
    from kinformer.lab.datastore.attach import attach_store

    opened = open_run(run)
    model: Decoder | Encoder = attach_store(opened, as_weights(opened.model(set), weights), open_run)
    return model


def open_run(run: str | Path) -> Run:
    """Open a run by its folder.

    The result has ``member``, ``recipe``, ``config``, ``task``, ``options`` (of the task), ``tokenizer``, ``data``,
    ``training``, ``metrics`` (of the best validation) and ``model()``.

    run: the run's folder.
    """
    from kinformer.lab.runs.run import open_run

    return open_run(run)


@preserving
def show(
    member: str, *, recipe: str | None = None, vocab_size: int | None = None, set: Mapping[str, object] | None = None
) -> Description:
    """Describe one member or run without computing anything: ``.member`` (its record), ``.config``, ``.facts``.

    The facts are data for JSON: paper, formulas, config, parameters by part, bytes of the state by length, and patterns
    as text.

    member: a member of the family, or a run's folder.
    recipe: the name of the member's recipe ("small" if not given).
    vocab_size: the number of token ids; the recipe's number if not given.
    set: overrides of the recipe by their paths.

    Errors: ``KinformerError`` for unknown names, and for ``recipe`` or ``vocab_size`` with a run, whose config is
    fixed.
    """
    from kinformer.lab.runs.describe import describe

    return describe(member, recipe, vocab_size, set)


@preserving
def estimate(member: str, **options: object) -> MemberEstimate:
    """Estimate the costs of a member without running it.

    The result has ``parameters`` and ``active_parameters`` (the parameters that one token uses); ``flops_inference``
    (a forward without gradients), ``flops_forward`` (the forward of a training step) and ``flops_step``, which count
    additions and multiplications of the batch; ``train_bytes``, ``inference_bytes``, ``state_bytes`` and ``peak_bytes``
    (of a process on a CPU); ``parts`` and ``memory``, the same costs by part; ``rules_of_thumb``; and ``cluster``, the
    costs on many devices.

    member: a member of the family.
    options: ``recipe`` ("small"), ``vocab_size``, ``set``, ``length`` (tokens of a sequence, 1024), ``batch_size`` (1),
        ``optimizer`` ("adamw") and ``precision`` ("fp32"); ``devices`` ("64"), ``hardware`` ("h100") and
        ``efficiency`` (0.5), for ``cluster``; see ``lab.estimation.options.EstimateOptions``.

    Errors: ``KinformerError`` for unknown names, sizes below 1 and lengths beyond the model's positions.
    """
    from kinformer.lab.estimation.options import EstimateOptions
    from kinformer.lab.runs.describe import estimate_member

    return estimate_member(request(EstimateOptions, {"member": member, **options}, "estimate"))


@preserving
def draw(subject: str | Path, **options: object) -> Drawing:
    """Draw attention patterns, encodings of positions, spans, early exits or a model's attention to an image.

    The result has ``out`` (the file, PNG or SVG by its ending), ``title``, ``lines`` (a description of each panel) and
    ``facts`` (the same as data for JSON). Drawing needs matplotlib.

    subject: a member, a run's folder, a kind of pattern or position, or a pattern or position as JSON.
    options: ``out``, ``recipe``, ``set``, ``length`` (tokens), ``layer`` and ``head`` (from 1), ``pattern``,
        ``position``, ``spans``, ``exits``, ``image``, ...; see ``lab.drawing.options.DrawOptions``.

    Errors: ``KinformerError`` for a subject that cannot be drawn, and for options that do not go together.
    """
    from kinformer.lab.drawing.options import DrawOptions
    from kinformer.lab.drawing.subject import draw

    return draw(request(DrawOptions, {"subject": subject, **options}, "draw"))


@preserving
def bench(members: Sequence[str] = (), **options: object) -> Bench:
    """Time members in turns with plain attention (gpt), each after a check of correctness.

    The result has ``timings`` (seconds by member, work and length), ``failed`` (members that fail the check, and
    why), ``memory`` (bytes by member and length), ``floor`` (what this machine can do at most) and ``crossings``.

    members: members of the family; linear-transformer, fast-weights and local if not given.
    options: ``lengths`` (tokens, as in ``[128, 512]``), ``batch_size``, ``work`` ("forward,step,prefill,decode"),
        ``rounds``, ``memory``, ``peers``, ``recipe``, ``set``, ``device``, ...;
        see ``lab.comparison.options.BenchOptions``.

    It seeds PyTorch's global random numbers, one thread at a time, as :func:`kinformer.train` does.

    Errors: ``KinformerError`` for unknown names, members that read no tokens, and where gpt itself fails its check.
    """
    from kinformer.lab.comparison.bench import bench
    from kinformer.lab.comparison.options import BenchOptions

    require_list("members", members)
    return bench(members, request(BenchOptions, options, "bench"))


@preserving
def compare(members: Sequence[str] = (), *, merge: Sequence[str | Path] = (), **options: object) -> Comparison:
    """Train members under one budget, measure them in turns, and write a report into the folder ``out``.

    The result has ``finished`` (the members with a metric, the best first), ``entrants`` (all members, with ``error``
    for a failed member), ``deciding`` (the metric) and ``seconds`` (by stage).

    members: members of the family; hybrids as "linear-transformer:3,gpt:1"; "wide=gpt" for another name. Without
        members, five that suit the use.
    merge: files of finished comparisons of one task and data, which are merged without any computation.
    options: ``data``, ``out``, ``for_`` (the use, such as "long"), one budget of ``steps``, ``tokens``, ``minutes`` or
        ``total_minutes``, ``parameters``, ``seeds``, ``sweep``, ``set``, ... (see
        ``lab.comparison.options.CompareOptions``), and options of the task.

    It seeds PyTorch's global random numbers, one thread at a time, as :func:`kinformer.train` does.

    Errors: ``KinformerError`` for a mistake that concerns all members; the failure of one member does not raise.
    """
    from kinformer.lab.comparison.compare import report
    from kinformer.lab.comparison.options import CompareOptions

    require_list("members", members)
    require_list("merge", merge)
    requested = request(CompareOptions, options, "compare", "Options")
    arguments = [repr(list(members)), *(f"{name}={value!r}" for name, value in options.items())]
    command = f"kinformer.compare({', '.join(arguments)})"
    return report(members, requested, [str(path) for path in merge], command).comparison


@preserving
def calibrate(run: str | Path, *, quiet: bool = True, **options: object) -> Calibrated | SearchResult:
    """Find thresholds of early exits on held-out text and write them into the run.

    ``.chosen`` is the lowest threshold whose risk is bounded (Learn then Test), or None if every threshold failed.
    ``.tested`` holds all tested thresholds. With ``search``, the result has ``.thresholds`` of every exit and
    ``.bits_per_byte``. Both results have ``.exits`` (layers per token), ``.facts`` and ``.run``.

    run: the run's folder.
    quiet: no progress on a terminal.
    options: ``risk``, ``confidence``, ``consistency``, ``prompts``, ``prompt_tokens`` and ``new_tokens`` (tokens),
        ``data``, ``split``, ``search``, ``tolerance`` (bits per byte), ...;
        see ``lab.calibration.options.CalibrateOptions``.

    Errors: ``KinformerError`` for runs without thresholds, and for too few samples.
    """
    from kinformer.lab.calibration.calibrate import calibrate
    from kinformer.lab.calibration.options import CalibrateOptions

    return calibrate(run, request(CalibrateOptions, options, "calibrate"), quiet)


@preserving
def index(run: str | Path, *, datastore: str | Path, quiet: bool = True, **options: object) -> Indexed:
    """Write a run's vector of every context of a text, and the next token, into a datastore for kNN-LM.

    The same call continues a stopped build. The result has ``store``, ``new`` (the number of written entries),
    ``seconds``, ``bytes``, ``lists`` and ``facts``.

    run: the run's folder.
    datastore: a new folder, or with ``append=True`` a datastore of the same run.
    quiet: no progress on a terminal.
    options: ``data``, ``split``, ``first``, ``append``, ``approximate``, ``dtype``, ``context``, ...; see
        ``lab.runs.options.IndexOptions``.

    Errors: ``KinformerError`` for a datastore of another run or text.
    """
    from kinformer.lab.runs.index import index
    from kinformer.lab.runs.options import IndexOptions

    return index(run, request(IndexOptions, {"datastore": datastore, **options}, "index"), quiet)


@preserving
def embed(run: str | Path, texts: str | Path | Sequence[str | Path], **options: object) -> np.ndarray:
    """Return vectors float32 [items, dim] of texts, images or sounds: the pooled last hidden states of a trained run.

    run: the folder of a run whose model reads text (an encoder or a decoder), images or speech.
    texts: a list of texts, or of the paths of images or sounds; or the path of a file or folder, as for the command.
    options: ``pooling`` ("mean" over an item's positions, "first" or "last"), ``batch_size`` (32), ``first``,
        ``text_field``, ``format``, ``set``, ``device``, ``threads``, ``quiet`` (True);
        see ``lab.runs.options.EmbedOptions``.

    A text longer than the training length is cut to its beginning.

    Errors: ``KinformerError`` for a run that reads neither text, images nor speech, for a text that is empty or not
    UTF-8, and for a damaged file.
    """
    import numpy as np

    from kinformer.lab.runs.inference import embeddings
    from kinformer.lab.runs.options import EmbedOptions

    if not isinstance(texts, str | Path):
        require_list("texts", texts)
    requested = request(EmbedOptions, {"quiet": True, **options}, "embed")
    return np.stack([embedded.vector for embedded in embeddings(run, texts, requested)])


@preserving
def serve(run: str | Path, **options: object) -> None:
    """Answer HTTP requests for completions and chats by a trained run of next-token, until Ctrl-C, SIGTERM or SIGHUP.

    options: see ``lab.runs.options.ServeOptions``; ``quiet`` is True.

    Errors: ``KinformerError`` for a run that cannot continue a text, a used address, and missing packages.
    """
    from kinformer.lab.runs.options import ServeOptions
    from kinformer.lab.serving.server import serve

    serve(run, request(ServeOptions, {"quiet": True, **options}, "serve"))


@preserving
def stream(run: str | Path, prompt: str, **options: object) -> Iterator[str]:
    """Continue a text with a trained run, and return an iterator that yields each piece of text without delay.

        for piece in kinformer.stream("runs/book", "It was ", max_new_tokens=100, temperature=0.8):
            print(piece, end="", flush=True)

    Generation stops when the iteration stops. The pieces together are the text of ``kinformer generate`` with the same
    seed.

    run: the folder of a run of next-token.
    prompt: the text to continue, which must not be empty.
    options: by the names of the flags of ``kinformer generate``: ``max_new_tokens`` (256), ``temperature`` (0.8),
        ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty`` (1.0), ``stop`` (a text or several), ``seed``,
        ``datastore``, ``device``, ...; see ``lab.runs.options.GenerateOptions``.

    Errors: the call raises ``KinformerError`` for a run that does not continue texts, and for wrong options.
    """
    from kinformer.lab.runs.inference import converse
    from kinformer.lab.runs.options import GenerateOptions

    stop: Any = options.get("stop", ())
    named = {"quiet": True, **options, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return converse(run, request(GenerateOptions, named, "stream")).turn(prompt)


@preserving
def trace(run: str | Path, text: str, **options: object) -> Trace:
    """Trace a trained run on a text: the attention of every head, and the states of every token, as plain tensors.

        traced = kinformer.trace("runs/book", "It was the best of times", layers=[1, 2])
        traced.tokens                       # ("I", "t", " ", ...), as many as T
        traced.hidden_states[0]             # [T, dim], after the first layer; one tensor for every use of a layer
        traced.attention[0].weights         # [heads, T, T], queries by keys, of the first chosen layer

    ``attention`` has an entry for every mixer: ``place``, ``layer``, ``heads``, ``weights`` [heads, T, T], ``values``
    [heads, T, width], ``outputs`` [heads, T, width], ``buckets`` [heads, rounds, T] (Reformer, Routing Transformer),
    ``spans`` ([heads] or [heads, T]). ``exits`` [T] is the number of layers of each token, None for a model without
    early exits. ``steps`` [T] is the number of steps until each token halted, None for a model whose tokens do not
    halt. See ``lab.runs.trace``.

    The weights come from the mixer's own kernels. Rows of softmax attention sum to 1. Kernel attention does not compute
    probabilities; its weights are ``implied``: the factor of each value in the output, of any sign. Mechanisms without
    weights (LSTM, tensorized attention, a star) have ``weights`` None and a ``note`` with the reason.

    run: the folder of a run whose model reads text. For a run that translates, the trace covers the target, and
        ``source`` covers the encoder.
    text: the text to trace; ``[MASK]`` stands for the mask token of a model with such a token.
    options: ``layers``, ``heads`` (numbers from 1; all), ``max_tokens`` (256), ``target``, ``set``, ``seed``,
        ``device``, ``threads``; see ``lab.runs.options.TraceOptions``.

    Errors: ``KinformerError`` for a run that does not read text, for an empty text, and for numbers of missing layers
    or heads.
    """
    from kinformer.lab.runs.options import TraceOptions
    from kinformer.lab.runs.trace import trace

    require_kind("text", text, str)
    return trace(run, text, request(TraceOptions, options, "trace"))


# Functions of the package that read and write folders of the library transformers, graphs, and token shards.


@preserving
def import_checkpoint(folder: str | Path, out: str | Path, name: str = "imported") -> ImportedRun:
    """Turn a Hugging Face checkpoint folder (config.json, safetensors) into a run folder that computes the same logits.

    The result has ``run``, ``parameters``, ``tokenizer`` (whether the folder had a tokenizer) and ``notes``.

    folder: the checkpoint; the how-to on Hugging Face checkpoints lists the supported architectures.
    out: the run folder, which must be new or empty.
    name: the name of the run's recipe.

    Errors: ``KinformerError`` that names the part of the checkpoint that cannot be imported faithfully.
    """
    from kinformer.lab.runs.importing import import_checkpoint

    return import_checkpoint(folder, out, name)


@preserving
def export(
    run: str | Path,
    out: str | Path,
    *,
    format: str = "hf",
    dtype: str = "float32",
    max_shard_size: str | int = "5GB",
    adapter: bool = False,
) -> Exported | ExportedGraph:
    """Write a run as a folder that the library transformers loads, or as a graph without Python.

    A folder of transformers has config.json, safetensors, tokenizer and model card. Its result has ``folder``,
    ``model_type``, ``native`` (whether transformers loads the folder without code of Kinformer), ``reason`` (why not),
    ``model_class``, ``auto_class``, ``parameters``, ``shards`` and ``dtype``. The result for a graph has ``folder``,
    ``format``, ``file``, ``leaves``, ``parameters`` and ``difference``.

    run: the folder of a run; a graph needs a run whose model continues tokens.
    out: the folder to write, which must be new or empty.
    format: "hf" (transformers) or "onnx" (one graph for prompts and steps).
    dtype: the type of the weights in the folder: "float32", "bfloat16" or "float16".
    max_shard_size: the largest size of a file of weights, such as "500MB" or a number of bytes.
    adapter: of a run trained with ``lora``, write its low-rank updates alone, as an adapter for the library PEFT.

    PyTorch's compiler makes the graphs, and it resets PyTorch's global random numbers to their earlier state.

    Errors: ``KinformerError`` for a model that the format cannot hold, and for wrong options.
    """
    from kinformer.lab.runs.exporting import export

    return export(run, out, format=format, dtype=dtype, max_shard_size=max_shard_size, adapter=adapter)


@preserving
def verify(subject: str | Path, *, trust_remote_code: bool = False, length: int = 24, limit: float = 1e-4) -> Proof:
    """Hold a causal model to its laws, and compare a run with its export, or a folder with its import.

    The result has ``holds``, ``laws`` and ``beside`` (verdicts with ``law``, ``holds``, ``difference``, ``case``).

    subject: a run folder, a folder of transformers, or "module:object": a model with the attribute ``vocab_size`` whose
        call ``model(tokens, cache, valid)`` returns logits and the cache.
    trust_remote_code: run the code in a folder of transformers; without it a folder with code is refused.
    length: the most tokens of a text, 2 to 64.
    limit: the largest difference of logits that counts as rounding, as a share of the largest logit.

    Errors: ``KinformerError`` if the subject is not a causal model or cannot be loaded.
    """
    from kinformer.lab.runs.importing import verify

    return verify(subject, trust_remote_code=trust_remote_code, length=length, limit=limit)


def pack(
    data: str | Path | Iterable[str | Mapping[str, object]],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    text_field: str | None = None,
    holdout: float | None = None,
    shard_mb: int = 256,
    workers: int | None = None,
    quiet: bool = True,
) -> Packed:
    """Turn text into token shards with a manifest. Training reads the shards in place: ``data=`` takes the folder.

    The same call continues a killed call. The result has ``folder``, ``manifest``, ``tokens`` (by split), ``bytes`` and
    ``facts``.

    data: a file, a folder or "stdlib"; each row of JSON lines (.jsonl) and of Parquet tables is a document. Documents
        can also be streamed: from a dataset of Hugging Face, "hf:NAME:SPLIT" or "hf:NAME:SUBSET:SPLIT", or from an
        iterable of texts or of rows with a text, such as an ``IterableDataset``. The iterable must allow a second pass.
    out: a new folder.
    tokenizer: the path of a tokenizer.json; bytes if not given.
    text_field: the field or column of tables with the text ("text" if not given).
    holdout: hold out this share for validation and test at once; if not given, 5 % for each. In tables, the
        contents of a document decide its split.
    shard_mb: megabytes of data for each shard.
    workers: the number of processes, one for each processor if not given. With several processes, scripts need the
        usual ``if __name__ == "__main__":``.
    quiet: no progress on a terminal.

    Errors: ``KinformerError`` for data that cannot be read, and for a folder with other contents.
    """
    from kinformer.lab.data.packing import packed

    return packed(
        data,
        out,
        tokenizer=tokenizer,
        text_field=text_field,
        holdout=holdout,
        shard_mb=shard_mb,
        workers=workers,
        quiet=quiet,
    )


def check_shards(folder: str | Path) -> Packed:
    """Compare every byte of a folder of token shards with the checksums in its manifest.

    Errors: ``KinformerError`` that names the first file that differs.
    """
    from kinformer.lab.data.packed import check_shards

    return check_shards(folder)
