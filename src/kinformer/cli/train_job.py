"""What ``kinformer train`` is to do, checked and written down before anything is trained."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from kinformer.cli import retrieval
from kinformer.cli.runs import tokenizer_of
from kinformer.cli.tasks import LISTOPS, NEXT_TOKEN, TASKS, edges_of, ids_of, masking_of, open_data, task_of
from kinformer.cli.train_begin import base_of, begin, planned, task_for
from kinformer.cli.train_checks import check_data, check_model, check_special
from kinformer.core.config import to_dict
from kinformer.core.errors import KinformerError
from kinformer.data import (
    ByteTokenizer,
    Corpus,
    FileTokenizer,
    Labelled,
    Tokenizer,
    open_corpus,
    spool,
    train_tokenizer,
)
from kinformer.data.corpus import STDLIB
from kinformer.family.runs import CONFIG, Run, open_run
from kinformer.family.table import member
from kinformer.tasks.listops import BOUNDS, NUMBER
from kinformer.training.checkpoint import Checkpoints
from kinformer.training.distributed import Group, started_by_torchrun
from kinformer.training.feeds import Feed, HiddenTokens, Labels
from kinformer.training.settings import DEFAULT_STEPS, Settings

if TYPE_CHECKING:
    from kinformer.cli.train import Options
    from kinformer.core.parts import ModelConfig

TOKENIZER = "tokenizer.json"
TOKENS = "{}-{}".format(*BOUNDS)
MAY_CHANGE = {
    "steps", "minutes", "validate_every", "checkpoint_every", "checkpoint_minutes", "keep", "log_every", "accumulate",
    "compile",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run folder that is ready, and how to train in it. Plain enough to be sent to other processes."""

    run: Run
    settings: Settings
    device: str
    strategy: Literal["ddp", "fsdp"]
    threads: int | None

    def feed(self) -> Feed:
        """The rows of the run's task, as ids of its tokenizer."""
        return _feed(self.run, self.settings, _data(self.run), self.device)

    def model(self) -> Any:
        """The model as the run begins: new, or with the weights of the run that it was told to begin with."""
        model = self.run.build()
        init = self.run.data.get("init")
        if init and not Checkpoints(self.run.folder / "checkpoints", 1).steps():
            begin(model, self.run, init)
        return model


def device_type(device: str) -> str:
    """ "cpu" or "cuda" for the option ``device``."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device.split(":")[0]


def prepare(options: Options) -> Job:
    """Check everything that can be checked, write the run folder's config, and say what is to be done."""
    if options.compile:
        _require_compiler()
    device = device_type(options.device)
    if device == "cuda" and options.devices > torch.cuda.device_count():
        raise KinformerError(
            f"--devices {options.devices}: there are {torch.cuda.device_count()} GPUs; ask for fewer, or --device cpu."
        )
    run, settings = _resumed(options) if options.resume else _begun(options)
    return Job(run, settings, device, options.strategy, options.threads)


def _begun(options: Options) -> tuple[Run, Settings]:
    folder = Path(options.out)
    _require_empty(folder)
    settings, task = _settings(options), task_for(options)
    if settings.steps is None and settings.minutes is None:
        settings = replace(settings, steps=DEFAULT_STEPS)
    if settings.objective is None:
        settings = replace(settings, objective=_objective(options, task))
    base = base_of(options)
    planned(options, base, task, None)
    with _tidy(folder):
        spec = task if task == LISTOPS else _spec(options.data, folder)
        tokenizer = _tokenizer(options, spec) if base is None else tokenizer_of(base)
        source = {"spec": spec, "holdout": options.holdout, "task": task}
        if task == LISTOPS:
            source |= {"examples": options.examples or NUMBER, "example_tokens": options.example_tokens or TOKENS}
        data = open_data(source, task, tokenizer)
        ids = ids_of(task, tokenizer)
        model = planned(options, base, task, ids, getattr(data, "classes", None))
        source |= retrieval.chosen(options, to_dict(model))
        check_model(model, ids, settings, _group(options))
        if task == LISTOPS or not isinstance(tokenizer, FileTokenizer):
            check_special(model, ids)
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.save(folder / TOKENIZER)
        run = Run(
            folder=folder,
            member=options.member,
            recipe=options.recipe if base is None or base.member != options.member else base.recipe,
            model=to_dict(model),
            tokenizer=TOKENIZER if isinstance(tokenizer, FileTokenizer) else "bytes",
            data=source | {"identity": data.identity} | ({} if base is None else {"init": str(base.folder.resolve())}),
            training=vars(settings),
        )
        check_data(data, settings)
        _feed(run, settings, data, device_type(options.device))
        run.save()
    return run, settings


def _objective(options: Options, task: str) -> Any:
    """What the member minimises for a task, or what is usual there."""
    own, fitting = member(options.member).objective, TASKS[task].objectives
    return own if own in fitting else fitting[0]


def _feed(run: Run, settings: Settings, data: Corpus | Labelled, device: str) -> Feed:
    if isinstance(data, Labelled):
        return Labels(data, settings, edges_of(run.config))
    if task_of(run) == NEXT_TOKEN:
        return retrieval.feed(run, settings, data, device)
    masking = masking_of(run.config, tokenizer_of(run), settings.mask_share, settings.whole_words)
    return HiddenTokens(data, settings, masking, edges_of(run.config))


def _group(options: Options) -> Group:
    """The processes that are going to train, as the first of them."""
    world = max(options.devices, int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1)
    device = "cuda" if device_type(options.device) == "cuda" else "cpu"
    return Group(torch.device(device), world=world, strategy=options.strategy)


def _resumed(options: Options) -> tuple[Run, Settings]:
    run = open_run(Path(options.out))
    if run.member != options.member:
        raise KinformerError(
            f"{run.folder}: holds a run of {run.member!r}, but {options.member!r} is to be trained; give another --out."
        )
    settings = _merged(run, options)
    task: Any = task_of(run)
    if options.task not in (None, task):
        raise _otherwise(run, f"--task {options.task}")
    task_for(replace(options, task=task))
    _check_unchanged(run, options)
    spec = run.data["spec"] if options.data == STDLIB else _spec(options.data, run.folder)
    data = dict(run.data) | {"spec": spec} | retrieval.resumed(run, options)
    run = replace(run, data=data, training=vars(settings))
    found, begun_with = _data(run).fingerprint, run.data["identity"].get("fingerprint")
    if found != begun_with:
        raise KinformerError(
            f"{spec}: is not the data that the run in {run.folder} was begun with ({found} instead of {begun_with}); "
            "give that data, or another --out."
        )
    run.save()
    return run, settings


def _settings(options: Options) -> Settings:
    return Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})


def _merged(run: Run, options: Options) -> Settings:
    """The run's own settings, with those that were given and may change."""
    stored = dict(run.training)
    if unknown := sorted(stored.keys() - {field.name for field in fields(Settings)}):
        raise KinformerError(f"{run.folder / CONFIG}: has the unknown setting {unknown[0]!r}; use a matching version.")
    given = {field.name: getattr(options, field.name) for field in fields(Settings)}
    given = {field.name: given[field.name] for field in fields(Settings) if given[field.name] != field.default}
    for name, value in given.items():
        if name not in MAY_CHANGE and value != stored.get(name):
            flag = name.replace("_", "-")
            raise KinformerError(
                f"--{flag} {value}: the run in {run.folder} was begun with {stored.get(name)}, and a resumed run goes "
                f"on as it was; leave --{flag} out, or give another --out."
            )
    if "steps" in given or "minutes" in given:
        stored |= {"steps": None, "minutes": None}
    return Settings(**stored | given)


def _check_unchanged(run: Run, options: Options) -> None:
    """Refuse a recipe, overrides, a tokenizer or a holdout unlike the run's own."""
    own = tokenizer_of(run)
    changed = None
    if options.recipe not in ("small", run.recipe):
        changed = f"--recipe {options.recipe}"
    elif options.set and to_dict(_replanned(run, options, own)) != run.model:
        changed = f"--set {options.set[0]}"
    elif options.tokenizer != "bytes" and FileTokenizer(options.tokenizer).fingerprint != own.fingerprint:
        changed = f"--tokenizer {options.tokenizer}"
    elif options.holdout not in (None, run.data.get("holdout")):
        changed = f"--holdout {options.holdout}"
    elif options.examples not in (None, run.data.get("examples")):
        changed = f"--examples {options.examples}"
    elif options.example_tokens not in (None, run.data.get("example_tokens")):
        changed = f"--example-tokens {options.example_tokens}"
    if changed:
        raise _otherwise(run, changed)


def _replanned(run: Run, options: Options, tokenizer: Tokenizer) -> ModelConfig:
    """What the run's model would be by these options."""
    task, init = task_of(run), run.data.get("init")
    classes = (run.data.get("identity") or {}).get("classes")
    options = replace(options, recipe=run.recipe)
    return planned(options, open_run(init) if init else None, task, ids_of(task, tokenizer), classes)


def _otherwise(run: Run, changed: str) -> KinformerError:
    return KinformerError(
        f"{changed}: the run in {run.folder} was begun otherwise, and a resumed run goes on as it was; "
        "leave it out, or give another --out."
    )


def _data(run: Run) -> Corpus | Labelled:
    return open_data(run.data, task_of(run), tokenizer_of(run))


def _spec(data: str, folder: Path) -> str:
    """``data`` as it can be found again: an absolute path, standard input as a file in the run folder."""
    if data == STDLIB:
        return data
    if data == "-":
        folder.mkdir(parents=True, exist_ok=True)
        return str(spool(sys.stdin.buffer, folder.resolve()))
    return str(Path(data).expanduser().resolve())


def _tokenizer(options: Options, spec: str) -> Tokenizer:
    if options.train_tokenizer is None:
        return ByteTokenizer() if options.tokenizer == "bytes" else FileTokenizer(options.tokenizer)
    if options.tokenizer != "bytes":
        raise KinformerError(
            f"--tokenizer {options.tokenizer} and --train-tokenizer {options.train_tokenizer} contradict; give one."
        )
    split = open_corpus(spec, holdout=options.holdout).splits["train"]
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer(split, options.train_tokenizer, Path(folder) / TOKENIZER)


def _require_empty(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise KinformerError(f"--out {folder}: is a file; give a folder.")
    if (folder / CONFIG).exists():
        raise KinformerError(
            f"--out {folder}: holds a run already; add --resume to continue it, or give another folder."
        )
    if folder.exists() and any(folder.iterdir()):
        raise KinformerError(f"--out {folder}: is not empty; give a new folder.")


def _require_compiler() -> None:
    """torch.compile writes C++ for a CPU; without a compiler it would fail in the midst of the first step."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise KinformerError(
            f"--compile: the C++ compiler {compiler!r} is not there; install it, set CXX, or leave --compile out."
        )


@contextmanager
def _tidy(folder: Path) -> Iterator[None]:
    """Leave no new folder behind when what follows fails before anything is trained."""
    new = not folder.exists()
    try:
        yield
    except BaseException:
        if folder.exists():
            for path in folder.iterdir():
                path.unlink()
            if new:
                folder.rmdir()
        raise
