"""The functions of the package that do the same as commands. Nothing here imports PyTorch before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.fields import require_kind, require_list, require_types

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from kinformer.lab.calibration.calibrate import Calibrated, SearchResult
    from kinformer.lab.comparison.bench import Bench
    from kinformer.lab.comparison.record import Comparison
    from kinformer.lab.data.packed import Packed
    from kinformer.lab.drawing.command import Drawing
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
    """Return ``function``, which restores the caller's threads and precision of products on leaving."""

    @wraps(function)
    def preserved(*arguments: P.args, **options: P.kwargs) -> R:
        from kinformer.runtime import process

        with process.preserved():
            return function(*arguments, **options)

    return preserved


def request(kind: type[O], options: Mapping[str, object], function: str, tasks: OptionKind | None = None) -> O:
    """Return the ``options`` of ``kinformer.<function>`` as the dataclass ``kind``, the tasks' own in ``task_options``.

    A path becomes text, and so does a list where ``kind`` has text, as in ``lengths=[128, 512]``.

    Errors: ``KinformerError`` for an unknown name, and for a value of another type.
    """
    from kinformer.lab.tasks.table import option_names

    texts = {option.name for option in fields(kind) if option.type in ("str", "str | None")}  # type: ignore[arg-type]
    general = {option.name for option in fields(kind)} - {"task_options"}  # type: ignore[arg-type]
    of_tasks = {} if tasks is None else option_names(tasks)
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
        ``tokenizer``, ``resume``, ``devices``, ``device``, ``threads``, ... (see ``lab.runs.options.TrainOptions``).
        The task's own: ``segments``, ``mask_share``, ``examples``, ... And ``quiet=True``: no progress on a terminal.

    Training seeds PyTorch's global random numbers for dropout and restores them at the end. So one
    thread of a process trains at a time, and a second call waits. A thread that draws global numbers during training
    shares them with it; processes share none.

    Errors: ``KinformerError`` with one sentence; an unknown name is one that names the nearest.
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
    """Measure a run folder on held-out data as its task says: ``.metrics``, ``.units``, ``.baselines``, ``.facts``.

    options: by the names of the flags of ``kinformer evaluate``: ``data``, ``split``, ``max_bytes``, ``set``, ...
        (see ``lab.runs.options.EvaluateOptions``), and the task's own: ``context``, ``lengths``, ``baseline``, ...
    """
    from kinformer.lab.runs.inference import evaluate
    from kinformer.lab.runs.options import EvaluateOptions

    quiet = bool(options.pop("quiet", False))
    return evaluate([run], request(EvaluateOptions, options, "evaluate", "EvaluationOptions"), quiet).evaluations[0]


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
    options: ``top_k`` (1), ``batch_size`` (32), ``max_items``, ``text_field``, ``label_field``, ``format``,
        ``skip_bad``, ``set``, ``device``, ``threads``, ``quiet`` (True; see ``lab.runs.options.PredictOptions``), and
        the task's own: ``mask``, ``beam``, ``prefixes``, ...

    Errors: ``KinformerError`` for a task that predicts nothing, and for an item that cannot be read, with its place.
    """
    from kinformer.lab.runs.inference import predictions
    from kinformer.lab.runs.options import PredictOptions

    requested = request(PredictOptions, {"quiet": True, **options}, "predict", "PredictionOptions")
    return [dict(predicted.row) for predicted in predictions(run, inputs, requested)]


@preserving
def load(run: str | Path, *, set: Mapping[str, object] | None = None) -> Decoder | Encoder:
    """Load a trained run's model with its best weights, in eval mode, and with its datastore and retriever.

    run: the run's folder.
    set: overrides that change no weight, such as ``{"layers.*.mixer.position.factor": 4}``.
    """
    from kinformer.lab.runs.run import STORES

    opened = open_run(run)
    model: Decoder | Encoder = STORES.attach(opened, opened.model(set))
    return model


def open_run(run: str | Path) -> Run:
    """Open a run by its folder: ``member``, ``recipe``, ``config``, ``task`` and its ``options``, ``tokenizer``,
    ``data``, ``training``, ``metrics`` (of the best validation) and ``model()``.

    run: the run's folder.
    """
    from kinformer.lab.runs.run import open_run

    return open_run(run)


@preserving
def show(
    member: str,
    *,
    recipe: str | None = None,
    vocab_size: int | None = None,
    set: Mapping[str, object] | None = None,
) -> Description:
    """Describe one member or run without computing anything: ``.member`` (its record), ``.config``, ``.facts``.

    The facts are data for JSON: paper, formulas, config, parameters by part, bytes of the state by length, and patterns
    as text.

    member: a member of the family, or a run's folder.
    recipe: which of the member's recipes ("small" if not given).
    vocab_size: how many ids the model knows; the recipe's own if not given.
    set: overrides of the recipe by their paths.

    Errors: ``KinformerError`` for unknown names, and for ``recipe`` or ``vocab_size`` of a run, which has its own.
    """
    from kinformer.lab.runs.describe import describe

    return describe(member, recipe, vocab_size, set)


@preserving
def estimate(member: str, **options: object) -> MemberEstimate:
    """Estimate the costs of a member, before anything is run.

    The result has ``parameters`` and ``active_parameters`` (the parameters that one token uses); ``flops_inference``
    (a forward without gradients), ``flops_forward`` (the forward of a training step) and ``flops_step``, additions and
    multiplications for the batch; ``train_bytes``, ``inference_bytes``, ``state_bytes`` and ``peak_bytes`` (of a
    process on a CPU); ``parts`` and ``memory``, which break these down; ``rules_of_thumb``; and ``cluster``, the
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
    """Draw attention patterns, encodings of positions, spans, early exits or what a model sees in an image.

    The result has ``out`` (the file, PNG or SVG by its ending), ``title``, ``lines`` (what each panel shows) and
    ``facts`` (all of it as data for JSON). It needs matplotlib.

    subject: a member, a run's folder, a kind of pattern or position, or one as JSON.
    options: ``out``, ``recipe``, ``set``, ``length`` (tokens), ``layer`` and ``head`` (from 1), ``pattern``,
        ``position``, ``spans``, ``exits``, ``image``, ...; see ``lab.drawing.options.DrawOptions``.

    Errors: ``KinformerError`` for what cannot be drawn, and for options that do not go together.
    """
    from kinformer.lab.drawing.command import draw
    from kinformer.lab.drawing.options import DrawOptions

    return draw(request(DrawOptions, {"subject": subject, **options}, "draw"))


@preserving
def bench(members: Sequence[str] = (), **options: object) -> Bench:
    """Time members in turns with plain attention (gpt), each after a check of correctness.

    The result has ``timings`` (seconds by member, work and length), ``failed`` (members that fail the check, and
    why), ``memory`` (bytes by member and length), ``floor`` (what this machine can do at most) and ``crossings``.

    members: of the family; linear-transformer, fast-weights and local if there are none.
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

    The result has ``finished`` (the members that have a metric, the best first), ``entrants`` (all, with
    ``error`` where one is out), ``deciding`` (the metric) and ``seconds`` (by stage).

    members: of the family; hybrids as "linear-transformer:3,gpt:1"; "wide=gpt" for another name. Without any, a small
        comparison of five.
    merge: files of finished comparisons of one task and data; they are put together and nothing is computed.
    options: ``data``, ``out``, one budget of ``steps``, ``tokens``, ``minutes`` or ``total_minutes``, ``parameters``,
        ``seeds``, ``sweep``, ``set``, ...; see ``lab.comparison.options.CompareOptions``. And the task's own.

    It seeds PyTorch's global random numbers, one thread at a time, as :func:`kinformer.train` does.

    Errors: ``KinformerError`` for a mistake that concerns all members; a member that fails alone is out.
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

    The lowest threshold whose risk is bounded (Learn then Test) is in ``.chosen``, None where there is none;
    ``.tested`` has the others. With ``search``, the result has ``.thresholds`` of every exit and ``.bits_per_byte``.
    Both have ``.exits`` (layers per token), ``.facts`` and ``.run``.

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
    """Write a run's vector of every context of a text, and the token that came next, into a datastore for kNN-LM.

    A build that was stopped continues at the same place. The result has ``store``, ``new`` (entries that were written),
    ``seconds``, ``bytes``, ``lists`` and ``facts``.

    run: the run's folder.
    datastore: a new folder, or with ``append=True`` one that this run made.
    quiet: no progress on a terminal.
    options: ``data``, ``split``, ``max_bytes``, ``append``, ``approximate``, ``dtype``, ``context``, ...; see
        ``lab.runs.options.IndexOptions``.

    Errors: ``KinformerError`` for a datastore of another run or text.
    """
    from kinformer.lab.runs.index import index
    from kinformer.lab.runs.options import IndexOptions

    return index(run, request(IndexOptions, {"datastore": datastore, **options}, "index"), quiet)


@preserving
def embed(run: str | Path, texts: str | Path | Sequence[str | Path], **options: object) -> np.ndarray:
    """Return vectors float32 [items, dim] of texts, images or sounds: the last hidden states of a trained run, pooled.

    run: the folder of a run whose model reads text (an encoder or a causal one), images or speech.
    texts: a list of texts, or of the paths of images or sounds; or the path of a file or folder, as for the command.
    options: ``pooling`` ("mean" over an item's positions, "first" or "last"), ``batch_size`` (32), ``max_items``,
        ``text_field``, ``format``, ``set``, ``device``, ``threads``, ``quiet`` (True);
        see ``lab.runs.options.EmbedOptions``.

    Texts longer than the training length count by their beginning. Errors: ``KinformerError`` for a run that reads
    none of these, for a text that is empty or not UTF-8, and for a damaged file.
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

    options: see ``lab.serving.options.ServeOptions``; ``quiet`` is True.

    Errors: ``KinformerError`` for a run that cannot continue a text, a used address, and missing packages.
    """
    from kinformer.lab.serving.options import ServeOptions
    from kinformer.lab.serving.server import serve

    serve(run, request(ServeOptions, {"quiet": True, **options}, "serve"))


@preserving
def stream(run: str | Path, prompt: str, **options: object) -> Iterator[str]:
    """Continue a text with a trained run; an iterator of the pieces of text, without delay.

        for piece in kinformer.stream("runs/book", "It was ", max_new_tokens=100, temperature=0.8):
            print(piece, end="", flush=True)

    Whoever stops iterating draws no more. The pieces together are what ``kinformer generate`` writes with that seed.

    run: the folder of a run of next-token.
    prompt: the text to continue, of a character or more.
    options: by the names of the flags of ``kinformer generate``: ``max_new_tokens`` (256), ``temperature`` (0.8),
        ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty`` (1.0), ``stop`` (a text or several), ``seed``,
        ``datastore``, ``device``, ...; see ``lab.runs.options.GenerateOptions``.

    Errors: ``KinformerError`` for a run that continues no text, and for wrong options, when it is called.
    """
    from kinformer.lab.runs.inference import converse
    from kinformer.lab.runs.options import GenerateOptions

    stop: Any = options.get("stop", ())
    named = {"quiet": True, **options, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return converse(run, request(GenerateOptions, named, "stream")).turn(prompt)


@preserving
def trace(run: str | Path, text: str, **options: object) -> Trace:
    """Trace a trained run on a text: what attends to what, and what becomes of every token, as plain tensors.

        traced = kinformer.trace("runs/book", "It was the best of times", layers=[1, 2])
        traced.tokens                       # ("I", "t", " ", ...), as many as T
        traced.hidden_states[0]             # [T, dim], after the first layer; one for every use of a layer
        traced.attention[0].weights         # [heads, T, T], queries by keys, of the first layer that was chosen

    ``attention`` has an entry for every mixer: ``place``, ``layer``, ``heads``, ``weights`` [heads, T, T], ``values``
    [heads, T, width], ``outputs`` [heads, T, width], ``buckets`` [heads, rounds, T] (Reformer, Routing Transformer),
    ``spans`` ([heads] or [heads, T]). ``exits`` [T] counts the layers that a token went through, ``steps`` [T] those
    that it took until it halted; both None where all take all. See ``lab.runs.trace``.

    The weights are the ones in the mixer's kernels, not computed again by another way. Rows of softmax attention sum to
    1. Kernel attention computes no probabilities: its weights are ``implied``, what each value adds to the output, of
    any sign. Mechanisms without weights (LSTM, tensorized attention, a star) have None and a ``note`` that says why.

    run: the folder of a run whose model reads text. Of a run that translates, the trace covers the target, and
        ``source`` covers the encoder.
    text: what to trace; ``[MASK]`` stands for a mask where the model has one.
    options: ``layers``, ``heads`` (numbers from 1; all), ``max_tokens`` (256), ``target``, ``set``, ``seed``,
        ``device``, ``threads``; see ``lab.runs.trace_options.TraceOptions``.

    Errors: ``KinformerError`` for a run that reads no text, an empty text, and numbers of no layer or head.
    """
    from kinformer.lab.runs.trace import trace
    from kinformer.lab.runs.trace_options import TraceOptions

    require_kind("text", text, str)
    return trace(run, text, request(TraceOptions, options, "trace"))


# Functions of the package that write folders: of the library transformers, of graphs, and of token shards. Free of
# PyTorch until it is needed.


@preserving
def import_checkpoint(folder: str | Path, out: str | Path, name: str = "imported") -> ImportedRun:
    """Turn a Hugging Face checkpoint folder (config.json, safetensors) into a run folder that computes the same logits.

    The result has ``run``, ``parameters``, ``tokenizer`` (whether there was one) and ``notes``.

    folder: the checkpoint; the how-to on Hugging Face checkpoints lists what can be imported.
    out: the run folder, which must be new or empty.
    name: the name of the run's recipe.

    Errors: ``KinformerError`` that names what cannot be imported faithfully.
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
) -> Exported | ExportedGraph:
    """Write a run as a folder that the library transformers loads: config.json, safetensors, tokenizer, model card; or
    as a graph without Python.

    The result has ``folder``, ``model_type``, ``native`` (whether transformers loads it without code of ours),
    ``reason`` (why not), ``model_class``, ``auto_class``, ``parameters``, ``shards`` and ``dtype``; of a graph
    ``folder``, ``format``, ``file``, ``leaves``, ``parameters`` and ``difference``.

    run: the folder of a run; of one whose model continues tokens for a graph.
    out: the folder to write, which must be new or empty.
    format: "hf" (transformers), "onnx" (one graph for prompts and steps), or "aoti" (a step compiled for this
        processor, for ``package`` of ``kinformer generate``).
    dtype: the type of the weights there: "float32", "bfloat16" or "float16".
    max_shard_size: the most that a file of weights holds, such as "500MB" or a number of bytes.

    PyTorch's compiler makes the graphs, and it resets PyTorch's global random numbers to their earlier state.

    Errors: ``KinformerError`` for a model that the format has no place for, and wrong options.
    """
    from kinformer.lab.runs.exporting import export

    return export(run, out, format=format, dtype=dtype, max_shard_size=max_shard_size)


@preserving
def verify(subject: str | Path, *, trust_remote_code: bool = False, length: int = 24, limit: float = 1e-4) -> Proof:
    """Hold a causal model to its laws, and compare a run with its export, or a folder with its import.

    The result has ``holds``, ``laws`` and ``beside`` (verdicts with ``law``, ``holds``, ``difference``, ``case``).

    subject: a run folder, a folder of transformers, or "module:object", a model that is called as ``model(tokens,
        cache, valid)``, returns logits and the cache, and has ``vocab_size``.
    trust_remote_code: run the code that a folder brings; without it such a folder is refused.
    length: the most tokens of a text, 2 to 64.
    limit: the largest difference of logits that counts as rounding, as a share of the largest logit.

    Errors: ``KinformerError`` for a subject that is not a causal model or cannot be loaded.
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
    """Turn text into token shards with a manifest, which training reads where they are: ``data=`` takes the folder.

    The same call continues one that was killed. The result has ``folder``, ``manifest``, ``tokens``
    (by split), ``bytes`` and ``facts``.

    data: a file, a folder or "stdlib"; JSON lines (.jsonl) and Parquet tables are documents, row by row. Or documents
        that are streamed: "hf:NAME:SPLIT" or "hf:NAME:SUBSET:SPLIT", a dataset of Hugging Face, or any iterable of
        texts or of rows with a text that can be read again, such as its ``IterableDataset``.
    out: a new folder.
    tokenizer: the path of a tokenizer.json; bytes if not given.
    text_field: the field or column of tables with the text ("text" if not given).
    holdout: hold out this share for validation and test at once; else 5 % each, of tables by the documents' contents.
    shard_mb: megabytes of the data that make a shard.
    workers: processes, one for each processor if not given. With more than one, scripts need the usual
        ``if __name__ == "__main__":``.
    quiet: no progress on a terminal.

    Errors: ``KinformerError`` for data that cannot be read, and for a folder that holds something else.
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
    """Hold every byte of a folder of token shards to its manifest's checksums.

    Errors: ``KinformerError`` that names the first file that differs.
    """
    from kinformer.lab.data.packed import check_shards

    return check_shards(folder)
