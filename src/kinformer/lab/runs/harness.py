"""Runs under EleutherAI's lm-evaluation-harness: ``lm`` is its model ``kinformer``, ``evaluate`` runs its tasks."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kinformer.core.model import CausalModel
from kinformer.generation.sampling import SamplingOptions, StoppedText, ends_of_text
from kinformer.generation.session import Session
from kinformer.lab.children import variable
from kinformer.lab.data import Tokenizer
from kinformer.lab.data.tokenizer import prompt_ids
from kinformer.lab.evaluation.bits import CHUNK
from kinformer.lab.evaluation.continuations import Continuation, ContinuationScorer, Score
from kinformer.lab.runs.options import EvaluateOptions, Machine
from kinformer.lab.runs.run import Run, open_run, require_continuing
from kinformer.lab.serving.fields import ChatTemplate
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationReport,
    EvaluationSettings,
    LoadedRun,
    TextTable,
    evaluated,
)
from kinformer.lab.tasks.options import NextTokenEvaluationOptions
from kinformer.lab.tasks.texts import CARRIED, check_positions, main_windows, short_names, tell_untrained
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import KinformerError, marked, nearest, plural, require
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task

try:
    import lm_eval.models  # noqa: F401 (the harness looks for its own models only while none is registered)
    from lm_eval import evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise KinformerError("the harness needs the package 'lm_eval'; pip install 'kinformer[harness]'.") from error

# Batches of the harness's prompts are continued, greedily or by sampling, until a stop string or the end of a text.

MAX_NEW_TOKENS = 256
"""The most tokens of a continuation if a task does not give a limit, as in the harness."""
ROWS = 32
LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The options of tasks that limit the tokens of a continuation; the first option in this order counts."""
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}
"""Options of other libraries that change nothing at these values."""


class Prompt(NamedTuple):
    """The ids to continue, and the task's ``generation_kwargs``."""

    tokens: Sequence[int]
    options: JsonObject


class Drawing(NamedTuple):
    """The way to continue prompts: by at most ``max_new_tokens`` tokens, until one of the texts ``stops`` appears."""

    max_new_tokens: int
    stops: tuple[str, ...]
    sampling: tuple[tuple[str, Any], ...]


def drawing_of(options: JsonObject) -> Drawing:
    """Return the ``Drawing`` that a task's ``generation_kwargs`` ask for.

    Decoding is greedy unless `do_sample` or a temperature is set.
    """
    values = {name: value for name, value in options.items() if value is not None}
    until = values.pop("until", [])
    stops = (until,) if isinstance(until, str) else tuple(until)
    numbers = [int(values.pop(name)) for name in LIMIT_NAMES if name in values]
    temperature = float(values.pop("temperature", 1.0 if values.get("do_sample") else 0.0))
    temperature = 0.0 if values.pop("do_sample", temperature > 0) is False else temperature
    values = {name: value for name, value in values.items() if NEUTRAL.get(name) != value}
    for name in values:
        if name not in SamplingOptions.__annotations__:
            near = nearest(name, sorted(SamplingOptions.__annotations__))
            raise KinformerError(f"generation_kwargs: {name!r} is not an option of generation here; {near}")
    if not temperature:  # greedy: of these options, only the repetition penalty changes the largest logit
        values = {name: value for name, value in values.items() if name == "repetition_penalty"}
    sampling = {"temperature": temperature} | values
    max_new_tokens = numbers[0] if numbers else MAX_NEW_TOKENS
    return Drawing(max_new_tokens, tuple(stop for stop in stops if stop), tuple(sampling.items()))


def continued(
    model: CausalModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    length: int | None,
    rows: int | None,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield the number of each prompt and its continuation, batch by batch; a batch has at most ``rows`` prompts.

    length: the most tokens of prompt and continuation together; a longer prompt loses its beginning.
    generator: gives the seed of every batch; None is PyTorch's global generator.
    """
    groups: dict[Drawing, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(drawing_of(prompt.options), []).append(number)
    for drawing, numbers in groups.items():
        room = None if length is None else length - drawing.max_new_tokens
        if room is not None and room < 1:
            raise KinformerError(
                f"a task draws up to {drawing.max_new_tokens} tokens, which leaves no room for a prompt in a context "
                f"of {length}; give a larger `context`, or the task a smaller max_gen_toks."
            )
        # A batch has prompts of similar lengths, so that little of it is padding.
        numbers.sort(key=lambda number: len(prompts[number].tokens), reverse=True)
        for start in range(0, len(numbers), rows or ROWS):
            batch = numbers[start : start + (rows or ROWS)]
            ends = [list(prompts[number].tokens[-room if room else 0 :]) for number in batch]
            yield from zip(batch, _batch(model, tokenizer, ends, drawing, generator), strict=True)


def _batch(
    model: CausalModel,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    drawing: Drawing,
    generator: torch.Generator | None,
) -> list[str]:
    """Return the continuations of ``prompts``, which are stepped as one batch until every prompt has ended."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts])
    valid = torch.arange(longest) < torch.tensor([[len(ids)] for ids in prompts])
    sampling = dict(drawing.sampling)
    if sampling.get("seed") is None:
        sampling["seed"] = int(torch.randint(2**62, (), generator=generator))
    session = Session(model, len(prompts), room=drawing.max_new_tokens, **sampling)
    session.feed(tokens, valid)
    ends = ends_of_text(model)
    rows = [StoppedText(tokenizer.stream(ids), drawing.stops, ends) for ids in prompts]
    texts = [""] * len(prompts)
    for drawn in session.stream(drawing.max_new_tokens):
        for number, (row, token) in enumerate(zip(rows, drawn, strict=True)):
            texts[number] += "" if row.stopped else row.feed(token)
        if all(row.stopped for row in rows):
            break
    return [text if row.stopped else text + row.finish() for text, row in zip(texts, rows, strict=True)]


# A run as the model ``kinformer`` of EleutherAI's lm-evaluation-harness (Gao et al. 2021).
#
# The harness defines the scores: context and continuation are tokenised together, trailing blanks of a context belong
# to the continuation, the prefix token stands for an empty context, inputs beyond the length lose their beginning, and
# a text without a context is scored in windows. ``lab.evaluation.continuations`` computes the scores and absorbs a
# shared beginning of several contexts once.

AUTO = "auto"
INSTEAD = "kinformer evaluate without the harness"
"""The remedy in errors about runs that the harness cannot measure."""


@register_model("kinformer")
class KinformerLM(TemplateLM):  # type: ignore[misc]
    """A run of next-token, which ``--model kinformer --model_args run=FOLDER`` names.

    run: the run's folder.
    context: the most tokens that the model reads, or "carried": the model reads all tokens, and the state is carried
        through a rolling text. The default is "carried" after training by segments, else the training length.
    chunk: the tokens of one forward; it changes no result.
    batch_size: the most contexts, or texts to continue, of one batch; "auto" takes as many as ``chunk`` allows.
    max_batch_size: the limit of "auto".
    device: "auto" is the GPU if there is one, else the CPU. "cuda" on a machine without a GPU means "auto".
    set: overrides of the config that change no weight; only from Python.
    quiet: show no progress bars.
    """

    def __init__(
        self,
        run: str | Path,
        context: str | int | None = None,
        chunk: int = CHUNK,
        batch_size: str | int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        set: Mapping[str, object] | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__()
        self.run = open_run(run)
        require_continuing(self.run, INSTEAD)
        self.quiet, self.rows = quiet, max_batch_size
        self.generator: torch.Generator | None = None
        """The generator of continuations; None is PyTorch's global generator, which the harness's own command seeds."""
        if batch_size is not None and batch_size != AUTO:
            self.rows = whole_number("batch_size", batch_size)
        self.chunk = whole_number("chunk", chunk)
        self._device = _device(device)
        self.model = self.run.model(set).to(self._device)
        self.length = _length(self.run, self.model, context)
        assert self.run.tokenizer is not None
        tokenizer = self.tokenizer_of_run = self.run.tokenizer
        self.requests = self.cut = 0
        """The number of requests with a context, and the number of requests that lost their beginning."""
        self._encoded = lru_cache(maxsize=64)(lambda text: prompt_ids(tokenizer, text).tolist())

    @property
    def eot_token_id(self) -> int:
        """Return the id that ends a text; for a run without such an id the last id of a new line."""
        return int(next(iter(ends_of_text(self.model)), self._encoded("\n")[-1]))

    @property
    def prefix_token_id(self) -> int:
        """Return the id that stands for an empty context: BOS where prompts begin with it, else the end of a text."""
        return next(iter(self.tokenizer_of_run.prefix), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Return the fingerprint of the run's tokenizer, by which the harness caches requests."""
        return self.tokenizer_of_run.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the text of the run's chat template, which the harness writes beside its results; "" if not used."""
        return self._template.source if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt that the run's chat template makes of messages. Without ``add_generation_prompt`` the
        prompt ends with the text of the last message, which the model continues."""
        text = self._template.prompt(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        begun = chat_history[-1]["content"].strip()
        return text[: text.rindex(begun) + len(begun)]

    @cached_property
    def _template(self) -> ChatTemplate:
        path = self.run.chat_template
        if path is None:
            raise KinformerError(f"{self.run.folder}: lacks a chat template; leave apply_chat_template out.")
        return ChatTemplate(path, (), self.run.prompts.get("special_tokens"))

    def get_model_info(self) -> dict[str, object]:
        """Return the facts about the model that the harness writes beside its results."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        context = CARRIED if self.length is None else self.length
        about: dict[str, object] = {"run": str(self.run.folder), "member": self.run.member, "context": context}
        return about | {"prefix_token_id": self.prefix_token_id, "model_num_parameters": parameters}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: object) -> list[int]:
        """Return the ids of ``string`` as a prompt, after BOS if the run's prompts begin with BOS."""
        return list(self._encoded(string))

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats, and whether greedy decoding gives the continuation."""
        encoded = [(request.args, *self._encode(*request.args)) for request in requests]
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text in nats: in the harness's windows, or with the state carried."""
        windows = [(number, part) for number, request in enumerate(requests) for part in self._windows(*request.args)]
        totals = [0.0] * len(requests)

        def add(index: int, score: Score) -> None:
            totals[windows[index][0]] += score.log_likelihood

        self._score([Continuation(tuple(a), tuple(b)) for _, (a, b) in windows], add, disable_tqdm)
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context up to the first stop string, without the stop string."""
        requested = [request.args for request in requests]
        prompts = [Prompt(self._encoded(text) or [self.prefix_token_id], options) for text, options in requested]
        self._note_cuts(len(prompt.tokens) + drawing_of(prompt.options).max_new_tokens for prompt in prompts)
        texts = [""] * len(prompts)
        with self._bar("generate_until", len(prompts), disable_tqdm) as bar:
            drawn = continued(self.model, self.tokenizer_of_run, prompts, self.length, self.rows, self.generator)
            for number, text in drawn:
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update()
        return texts

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **options: object,
    ) -> list[tuple[float, bool]]:
        self._note_cuts(len(a) + len(b) - 1 for _, a, b in requests)
        results = [(0.0, True)] * len(requests)

        def note(index: int, score: Score) -> None:
            results[index] = (score.log_likelihood, score.greedy)
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])

        self._score([Continuation(tuple(a), tuple(b)) for _, a, b in requests], note, disable_tqdm)
        return results

    def _score(self, continuations: list[Continuation], note: Callable[[int, Score], None], disable_tqdm: bool) -> None:
        scorer = ContinuationScorer(self.model, self.length, chunk=self.chunk, rows=self.rows)
        with self._bar("loglikelihood", len(continuations), disable_tqdm) as bar:
            for index, score in scorer.scores(continuations):
                note(index, score)
                bar.update()

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both, tokenised together; the prefix token stands for an empty context."""
        if context:
            return self._encode_pair(context, continuation)  # type: ignore[no-any-return]
        ids, prefix = self.tok_encode(continuation), self.prefix_token_id
        return (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Return the windows of a text as pairs of context and tokens to predict; each token is predicted once."""
        ids = self.tok_encode(text)
        if self.length is None:
            return [([self.prefix_token_id], ids)]
        windows = get_rolling_token_windows(
            token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.length, context_len=1
        )
        return [make_disjoint_window(window) for window in windows]

    def _note_cuts(self, lengths: Iterable[int]) -> None:
        for tokens in lengths:
            self.requests += 1
            self.cut += self.length is not None and tokens > self.length

    def _bar(self, what: str, total: int, disabled: bool) -> tqdm:
        return tqdm(total=total, desc=f"Running {what} requests", disable=True if disabled or self.quiet else None)


def whole_number(name: str, value: str | int) -> int:
    """Return ``value``, which may be text, as a whole number of 1 or more; errors name the argument ``name``."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise KinformerError(f"`{name}` is {value!r} but must be a whole number of 1 or more.") from None
    require(name, number, 1)
    return number


def _device(name: str | None) -> torch.device:
    """Return the device ``name``; a machine without a GPU takes "auto" for "cuda:0", the default of the harness."""
    name = AUTO if name is None or (name.startswith("cuda") and not torch.cuda.is_available()) else name
    return Machine(device=name).usable_device()


def _length(run: Run, model: CausalModel, context: str | int | None) -> int | None:
    """Return the most tokens that the model reads; None if the state is carried over any number of tokens."""
    options = NextTokenEvaluationOptions(context=None if context is None else str(context))
    windows = main_windows(run, model, options.context, options.overlap)
    check_positions(model, windows)
    tell_untrained(run, 0 if windows is None else windows.context)
    return None if windows is None else windows.context


# Evaluation of runs by tasks of lm-evaluation-harness.

READ = ("set", "first", "chunk", "seed", "device", "threads", "task_options")
"""The general options that tasks of the harness read."""
RESAMPLES = 1000
"""Bootstrap resamples for the standard errors of metrics without a formula for the error."""

POOL = "DISABLE_MULTIPROC"
"""The variable that keeps the harness from resampling in forks: a fork of a process with threads may hang."""


class Value(NamedTuple):
    """A metric of a task, or of a group of tasks, of the harness; ``error`` is the standard error, or None."""

    task: str
    metric: str
    value: float
    error: float | None
    lower_is_better: bool


class Tasks(TaskManager):  # type: ignore[misc]
    """The harness's tasks. A task that cannot be loaded is refused in one sentence."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        for name in names:
            if name.endswith((".yaml", ".yml")) and not _is_file(name):
                raise KinformerError(f"`harness` {name}: the file does not exist; give the path of a task's YAML file.")
        super().__init__(include_defaults=not all(map(_is_file, names)))
        for name in names:
            if not _is_file(name) and name not in self.all_tasks:
                near = nearest(name, self.all_tasks)
                raise KinformerError(f"`harness` {name}: is neither a task of the harness nor a YAML file; {near}")

    def load(self, task_list: list[str]) -> Mapping[str, Mapping[str, Task]]:
        """Load tasks with their data, as the harness does."""
        with _in_a_sentence("cannot be loaded", task_list, "check its file and data, or the connection if it has none"):
            return super().load(task_list)


@contextmanager
def _in_a_sentence(what: str, names: Sequence[object], remedy: str) -> Iterator[None]:
    """Turn an exception of the harness, or of a library that it calls, into one sentence about the tasks;
    ``MemoryError`` and ``RuntimeError`` pass unchanged."""
    try:
        yield
    except (KinformerError, MemoryError, RuntimeError):
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        where = f"`harness` {','.join(map(str, names))}"
        raise KinformerError(f"{where}: {what} ({type(error).__name__}: {reason}); {remedy}.") from error


def evaluate_by_harness(
    runs: Sequence[Run], options: EvaluateOptions, task_options: NextTokenEvaluationOptions, quiet: bool
) -> EvaluationReport:
    """Evaluate each run by the harness's tasks, and return a report with every metric of every task."""
    for run in runs:
        require_continuing(run, INSTEAD)
    for option in fields(EvaluateOptions):  # a task of the harness brings its own data
        default = EvaluationSettings().split if option.name == "split" else option.default
        if option.name not in READ and getattr(options, option.name) != default:
            raise KinformerError(f"{marked(option.name)}: means nothing to tasks of a `harness`; leave it out.")
    options.usable_device()
    names = [name.strip() for name in str(task_options.harness).split(",")]
    with _quietly(quiet):
        tasks = Tasks(names)
    parts = [_evaluate(run, tasks, options, task_options, quiet) for run in runs]
    together: list[str | TextTable] = []
    if len(runs) > 1:  # a column for each run
        columns = [{(one.task, one.metric): f"{one.value:.4f}" for one in values} for _, values in parts]
        rows = [[*key, *(column.get(key, "-") for column in columns)] for key in columns[0]]
        headers = ("task", "metric", *short_names([run.folder for run in runs]))
        together = ["", TextTable(headers, rows, range(2, len(headers)))]
    return EvaluationReport([evaluation for evaluation, _ in parts], together)


def _evaluate(
    run: Run, tasks: Tasks, options: EvaluateOptions, task_options: NextTokenEvaluationOptions, quiet: bool
) -> tuple[Evaluation, list[Value]]:
    started_at = time.perf_counter()
    options.prepare(options.seed)
    shown = not quiet and _watched()
    lm = KinformerLM(
        run.folder, task_options.context, options.chunk, device=options.device, set=options.set, quiet=not shown
    )
    lm.generator = torch.Generator().manual_seed(options.seed or DEFAULT_OTHER_SEED)
    remedy = "check it by the command lm_eval validate, and that it has as many examples as `fewshot` says"
    with _seeded(options.seed), _quietly(quiet), _in_a_sentence("cannot be done", tasks.names, remedy):
        loaded = tasks.load(tasks.names)
        for task in loaded["tasks"].values():  # a task that asks for 0 examples keeps 0, as in the harness
            usual = task.get_config("num_fewshot")
            if usual != 0:
                task.set_config("num_fewshot", (usual or 0) if task_options.fewshot is None else task_options.fewshot)
            task.set_fewshot_seed(options.seed or DEFAULT_OTHER_SEED)
        results: JsonObject = evaluate(lm, loaded, limit=options.first, bootstrap_iters=RESAMPLES, log_samples=False)
    values = values_of(results)
    carried = lm.length is None
    read = "the state carried, so that rolling texts are read whole" if carried else f"contexts of {lm.length} tokens"
    cut = f"{lm.cut:,} of {plural(lm.requests, 'request')} with a context had more tokens; only the end was read"
    changes = tuple(f"{path}={value}" for path, value in options.set.items())
    subject = LoadedRun(run, None, changes)
    about = f"{subject.title} by lm-evaluation-harness {version('lm_eval')}, {read}"
    evaluation = evaluated(
        subject,
        {Metric(f"{value.task}/{value.metric}", value.metric, value.lower_is_better): value.value for value in values},
        {"harness": version("lm_eval"), "tasks": tasks.names},
        [about, *([cut] if lm.cut else []), _table(values, results)],
        facts={
            "context": CARRIED if carried else lm.length,
            "prefix_token": lm.prefix_token_id,
            "requests": lm.requests,
            "cut": lm.cut,
            "limit": options.first,
            "tasks": {name: _facts(name, values, results) for name in dict.fromkeys(value.task for value in values)},
        },
        since=started_at,
    )
    return evaluation, values


def values_of(results: JsonObject) -> list[Value]:
    """Return all values of the harness's ``results`` in their order, with the values of groups."""
    values = []
    for task, metrics in results["results"].items():
        better = results["higher_is_better"].get(task) or {}
        for key, value in metrics.items():
            metric, comma, rule = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = metrics.get(f"{metric}_stderr,{rule}")
            name = metric if rule == "none" else f"{metric},{rule}"
            deviation = float(error) if isinstance(error, int | float) else None
            values.append(Value(task, name, float(value), deviation, better.get(metric) is False))
    return values


def _facts(task: str, values: Sequence[Value], results: JsonObject) -> dict[str, object]:
    """Return the report on a task as data for JSON."""
    metrics = {
        value.metric: {"value": value.value, "standard_error": value.error, "lower_is_better": value.lower_is_better}
        for value in values
        if value.task == task
    }
    items = (results["n-samples"].get(task) or {}).get("effective")
    version_and_shots = {"version": results["versions"].get(task), "fewshot": results["n-shot"].get(task)}
    return version_and_shots | {"items": items, "metrics": metrics}


def _table(values: Sequence[Value], results: JsonObject) -> TextTable:
    rows = []
    for number, value in enumerate(values):
        facts = _facts(value.task, (), results)
        first = number == 0 or values[number - 1].task != value.task
        about = [value.task, facts["items"] or "", facts["fewshot"] if facts["fewshot"] is not None else ""]
        error = "" if value.error is None else f"{value.error:.4f}"
        rows.append([*(about if first else ["", "", ""]), value.metric, f"{value.value:.4f}", error])
    return TextTable(("task", "items", "shots", "metric", "value", "± error"), rows, (1, 2, 4, 5))


def _is_file(name: str) -> bool:
    return Path(name).expanduser().is_file()


def _watched() -> bool:
    """Return whether a user sees progress bars: whether standard error is a terminal."""
    return getattr(sys.stderr, "isatty", bool)()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's random numbers with ``seed`` (0: the harness's own seeds), and restore them."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed or DEFAULT_RANDOM_SEED)
    np.random.seed((seed or DEFAULT_OTHER_SEED) % (1 << 32))
    try:
        with variable(POOL, "1"):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def _quietly(quiet: bool) -> Iterator[None]:
    """Let the harness write nothing but progress bars on a terminal; standard output is for the result."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    with ExitStack() as streams:
        stderr = sys.stderr
        if quiet or not _watched():
            stderr = streams.enter_context(open(os.devnull, "w", encoding="utf-8"))
            streams.enter_context(redirect_stderr(stderr))
        streams.enter_context(redirect_stdout(stderr))
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
