"""The form of a command: its options for the parser, the help and the shell, and the parsing of arguments."""

from __future__ import annotations

import contextlib
import io
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from kinformer.family.table import FAMILY
from kinformer.lab.cli.output import print_json, print_table
from kinformer.lab.tasks.evaluation import TextTable
from kinformer.lab.tasks.table import OptionKind, tasks
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import FORMER, RARE, Checked, KinformerError, field_docs, nearest, spelled, today
from kinformer.runtime.files import require_file
from kinformer.runtime.parsing import parse_count, parse_toml
from kinformer.runtime.plugins import import_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


O = TypeVar("O")

# The options that commands share.

Hidden = Annotated[Any, tyro.conf.Suppress]


@dataclass(frozen=True, kw_only=True)
class Printing(Checked):
    """The options of printing, which every command takes."""

    json: bool = False
    """Print one JSON object instead of text."""
    quiet: bool = False
    """Print only the result, without progress or notes."""
    verbose: bool = False
    """Print more: versions, device and threads at first, time and memory at the end, and after an error its traceback
    and, with several processes, PyTorch's messages."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Read options by name from this file, as in: batch_size = 16. Options on the command line take precedence."""
    import_: Annotated[str | None, tyro.conf.arg(name="import", metavar="FILE.py")] = None
    """First run this Python file of yours, which adds mixers, members or tasks by kinformer.register."""

    def show(self, facts: object, text: Iterable[str | TextTable]) -> int:
        """Print ``facts`` with ``--json``, else the lines and tables of ``text``; return the exit status 0."""
        if self.json:
            print_json(facts)
            return 0
        for block in text:
            print_table(*block) if isinstance(block, TextTable) else print(block)
        return 0


@dataclass(frozen=True, kw_only=True)
class UsingRun(Printing):
    """The options that every command with one run takes."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The run folder."""


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Printing):
    """The options that every command with random numbers takes."""

    seed: int = 0
    """The seed of all random numbers."""

    LEAST = {"seed": 0}


# The order of options in the help.

FIRST = (
    "member", "folder", "folders", "inputs", "subject", "data", "split", "out", "prompt", "prompt_file",
    "max_new_tokens", "temperature", "minutes", "steps", "recipe", "set", "task", "length", "batch_size", "lr",
    "resume",
)  # fmt: skip
GROUPS = {
    "setup": ("text_field", "init", "tokenizer", "train_tokenizer", "holdout"),
    "optimisation": (
        "optimizer", "schedule", "warmup", "weight_decay", "clip", "average", "ema", "accumulate", "objective",
    ),
    "checkpoint": (
        "validate_every", "validation_tokens", "patience", "checkpoint_every", "sample_every",
    ),
    "retrieval": ("datastore", "retriever", "weight", "neighbours", "knn_temperature", "probes", "tune", "sizes"),
    "machine": ("device", "threads", "precision", "weights", "chunk", "compile", "devices", "strategy", "parallel",
        "hardware", "efficiency",
    ),
    "general": ("seed", "json", "quiet", "verbose", "no_echo", "config", "import_"),
}  # fmt: skip
"""Groups of options by their titles. Options in neither table come after the options in ``FIRST``."""

CHANGES = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH=VALUE")]
"""The type of ``set`` on the command line; the dataclasses of options hold ``set`` as a mapping."""
_PLACEHOLDERS: dict[object, str] = {float | None: "X", str | None: "TEXT"}
_REQUIRED: dict[str, tuple[object, ...]] = {
    "member": (tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER")),
    "subject": (tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER|PATTERN")),
    "out": (tyro.conf.arg(metavar="DIR"),),
    "datastore": (tyro.conf.arg(metavar="FOLDER"),),
}
"""The parser's marks of required options."""


class Entry(NamedTuple):
    """An option or a group of options, as ``make_dataclass`` takes it."""

    name: str
    hint: object
    default: Field[object]


def form_of(
    options: type,
    kind: OptionKind | None,
    defaults: Mapping[str, object] | None = None,
    only: Collection[str] | None = None,
) -> type:
    """Return a dataclass with the fields of ``options``: first the most used options, then groups of other options,
    and one group for each class of tasks' own options.

    The group of a class has the name of the first task with these options. Tasks share an option of one name, type and
    default. An option whose name is taken gets its task's name as a prefix: ``--task.option``.

    defaults: values of missing options, by name.
    only: the tasks whose options the help shows (all by default).
    """
    by_name = _entries(options, defaults or {})
    named = {
        name for names in GROUPS.values() for name in names if name in by_name and _has_default(by_name[name].default)
    }
    flat = [name for name in FIRST if name in by_name]
    rest = [name for name in by_name if name not in flat and name not in named]
    needed = [name for name in rest if not _has_default(by_name[name].default)]
    ordered = [by_name[name] for name in dict.fromkeys(flat + needed + rest)]
    groups = []
    for title, names in GROUPS.items():
        if entries := [by_name[name] for name in names if name in named]:
            group = make_dataclass(title, entries, frozen=True, kw_only=True)
            groups.append(Entry(title, Annotated[group, tyro.conf.OmitArgPrefixes], field(default_factory=group)))
    task_groups = [] if kind is None else _task_groups(kind, set(by_name), only)
    return make_dataclass(options.__name__, [*ordered, *task_groups, *groups], frozen=True, kw_only=True)


def filled(options: type[O], form: DataclassInstance) -> O:
    """Return ``options`` with the parser's values: ``set`` by path, and the options of tasks in ``task_options``."""
    values: dict[str, Any] = {}
    of_task: dict[str, object] = {}
    for item in fields(form):
        value = getattr(form, item.name)
        if not is_dataclass(value):
            values[item.name] = value
        elif item.name in GROUPS:
            values |= vars(value)
        else:
            defaults = {inner.name: inner.default for inner in fields(value)}
            of_task |= {name: chosen for name, chosen in vars(value).items() if chosen != defaults[name]}
    if of_task:
        values["task_options"] = of_task
    if "set" in values:
        changes, values["set"] = overrides(values["set"]), {}
        names = {item.name for item in fields(options)} & {item.name for item in fields(Settings)}  # type: ignore[arg-type]
        for path, text in changes.items():
            name = path.removeprefix("training.")
            if name == path:
                values["set"][path] = text
            elif name not in names:
                raise KinformerError(f"`set` {path}: is not a setting of training here; {nearest(name, names)}")
            else:
                values[name] = text
                with contextlib.suppress(ValueError):
                    values[name] = json.loads(text)
    return options(**values)


def overrides(changes: Sequence[str]) -> dict[str, str]:
    """Return ``("path=value", ...)`` as a mapping; the value is the text after the first equals sign."""
    for change in changes:
        if not re.match(r"[^=]+=", change):
            raise KinformerError(f"--set {change}: is not path=value; write for example layers.*.mixer.num_heads=8.")
    return dict(change.split("=", 1) for change in changes)


def flags(form: type) -> dict[str, object]:
    """Return the types of all options and positional arguments by name; an option's name is the text after ``--``."""
    return {name: hint for item in fields(form) for name, hint in _flags_of(item).items()}


def _flags_of(item: Field[Any]) -> dict[str, object]:
    """Return the types of the options in one field of a form, by name: of an option itself, or of a group."""
    inner, *marks = get_args(item.type) if get_origin(item.type) is Annotated else (item.type,)
    if not is_dataclass(inner):
        return {_flag(item.name): item.type}
    prefix = "" if tyro.conf.OmitArgPrefixes in marks else f"{_flag(item.name.removesuffix('_task'))}."
    return {prefix + name: hint for name, hint in flags(inner).items()}  # type: ignore[arg-type]


def is_positional(hint: object) -> bool:
    """Return whether an option of type ``hint`` is positional, so that it is given without its name."""
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def bare(hint: object) -> object:
    """Return the type without the parser's marks."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _entries(options: type, defaults: Mapping[str, object], more: Mapping[str, str] = {}) -> dict[str, Entry]:
    """Return the entry of every option; its annotation holds the parser, and the help, which ends with ``more``."""
    hints, docs = get_type_hints(options, include_extras=True), option_docs(options)
    entries = {}
    for item in fields(options):
        hint = hints[item.name]
        suppressed = tyro.conf.Suppress in getattr(hint, "__metadata__", ())
        if item.name == "task_options" or suppressed or (item.name in RARE and "set" in hints):
            continue
        default: Any = field(default=defaults[item.name]) if item.name in defaults else copy(item)
        if item.name == "set":
            hint, default = CHANGES, field(default=())
        elif item.name == "member" or (item.name in _REQUIRED and not _has_default(item)):
            hint = Annotated[(hint, *_REQUIRED[item.name])] if bare(hint) is hint else hint
        elif item.name.endswith("_"):
            hint = Annotated[hint, tyro.conf.arg(name=_flag(item.name))]
        about = docs.get(item.name, "") + more.get(item.name, "")
        entries[item.name] = Entry(item.name, _parsed(hint, about, default), default)
    return entries


def _parsed(hint: object, docs: str, default: Field[object]) -> object:
    """Return ``hint``, annotated with its help, the placeholder of its value, and the parser of a number."""
    inner = bare(hint)
    metavar, shown = None, "" if default.default is None or default.default == () else None
    if get_origin(inner) is tuple and not _has_default(default):
        shown = "(required)"  # otherwise tyro shows an empty tuple as the default
    if inner in _PLACEHOLDERS and not any(getattr(mark, "metavar", None) for mark in get_args(hint)):
        metavar = _PLACEHOLDERS[inner]
    elif choices := [name for part in get_args(inner) for name in get_args(part)]:
        metavar = "{" + ",".join(map(str, choices)) + "}"
    about = tyro.conf.arg(help=docs, help_behavior_hint=shown, metavar=metavar)
    if inner in (int, int | None):
        return Annotated[hint, _COUNT, about]
    if inner in (float, float | None):
        return Annotated[hint, _NUMBER, about]
    return Annotated[hint, about]


def _task_groups(kind: OptionKind, taken: set[str], only: Collection[str] | None) -> Iterator[Entry]:
    """Yield the groups of tasks' own options; tasks share an option of one name, type and default."""
    owners: dict[type, str] = {}
    for task in tasks():
        owners.setdefault(getattr(task, kind), task.name)
    forms = {owner: {item.name: (item.type, item.default) for item in fields(owner)} for owner in owners}
    wanted = [forms[getattr(task, kind)] for task in tasks() if only is not None and task.name in only]
    shown = set[tuple[str, object]]()
    for owner, name in owners.items():
        others = {task: forms[other] for other, task in owners.items() if other is not owner}
        also = {
            key: [task for task, one in others.items() if one.get(key) == item] for key, item in forms[owner].items()
        }
        more = {key: f" (Also of {', '.join(names)}.)" for key, names in also.items() if names}
        made = _entries(owner, {}, more)
        entries = {key: item for key, item in made.items() if (key, forms[owner][key]) not in shown}
        shown |= {(key, forms[owner][key]) for key in entries}
        same = {key for key in entries if only is None or any(one.get(key) == forms[owner][key] for one in wanted)}
        shown_here = [entry for key, entry in entries.items() if key in same]
        about = {"__doc__": f"Options of the {name if only is None else ' and '.join(only)} task."}
        group = make_dataclass(owner.__name__, shown_here, frozen=True, kw_only=True, namespace=about)
        hint: object = Annotated[group, tyro.conf.arg(name=name)]
        if not entries.keys() & taken:
            hint = Annotated[hint, tyro.conf.OmitArgPrefixes]
        if shown_here:
            yield Entry(f"{name.replace('-', '_')}_task", hint, field(default_factory=group))
        taken |= entries.keys()


def _number(text: str) -> float:
    """Return the number in ``text``; the options check later whether it is finite and in range."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number, such as 3, 0.5 or 1e-3") from None


def _spec(metavar: str, parse: Callable[[str], object], kinds: tuple[type, ...]) -> PrimitiveConstructorSpec[Any]:
    """Return the parser of one value of ``kinds``."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: parse(texts[0]),
        is_instance=lambda value: value is None or isinstance(value, kinds),
        str_from_instance=lambda value: [str(value)],
    )


_COUNT, _NUMBER = _spec("N", parse_count, (int,)), _spec("X", _number, (int, float))


def option_docs(options: type) -> dict[str, str]:
    """Return the text under every field of a dataclass and of its bases, by name, as one line. The parser also reads
    such texts, but it needs source code, and a class that :func:`form_of` makes has none."""
    return {name: spelled(text) for name, text in field_docs(options).items()}


def _has_default(entry: Field[object]) -> bool:
    return entry.default is not MISSING or entry.default_factory is not MISSING


def _flag(name: str) -> str:
    """Return the flag of an option; ``for_`` and ``import_`` end with a mark, because Python has these keywords."""
    return name.rstrip("_").replace("_", "-")


# Parsing; an argument that cannot be parsed becomes an error of one sentence.


def parse(
    options: type[O], kind: OptionKind | None, arguments: Sequence[str], *, prog: str, description: str
) -> O | None:
    """Return ``options`` filled from ``arguments`` and from the file of ``--config``; None after printing the help.
    ``kind`` names the class of tasks' own options that the command takes too."""
    _import_file(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    shape = form_of(options, kind)
    written_options = [_today(argument, flags(shape)) for argument in arguments]
    before_dashes = written_options[: written_options.index("--")] if "--" in written_options else written_options
    if (path := _value_of("--config", before_dashes)) is not None:
        defaults, written = read(path, flags(shape))
        _import_file(written)
        shape, written_options = form_of(options, kind, defaults), written + written_options
    if {"-h", "--help"} & set(before_dashes):
        parsed, written_options = form_of(options, kind, only=named_tasks(written_options)), ["--help"]
    else:
        parsed = _without_unused_groups(shape, written_options)
    output = io.StringIO()
    settings = tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction, tyro.conf.HelptextFromCommentsOff
    try:
        with contextlib.redirect_stderr(output):
            form: DataclassInstance = tyro.cli(
                parsed, prog=prog, description=description, args=written_options, config=settings
            )
        return filled(options, form)
    except SystemExit as end:
        if not end.code:
            return None
    if text := suggestion(arguments, flags(shape)):
        raise KinformerError(f"{prog.removeprefix('kinformer ')}: {text}")
    raise KinformerError(sentence(output.getvalue(), prog))


def _without_unused_groups(form: type, arguments: Sequence[str]) -> type:
    """Return ``form`` without the groups of tasks' options that ``arguments`` do not name. The parser needs most of its
    time for them. An unknown name leaves all groups, among which the parser finds what it may mean."""
    names = {argument[2:].partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")}
    unknown = names - flags(form).keys()
    entries = [
        Entry(item.name, item.type, copy(item))
        for item in fields(form)
        if unknown or not item.name.endswith("_task") or names & _flags_of(item).keys()
    ]
    return make_dataclass(form.__name__, entries, frozen=True, kw_only=True)


def _import_file(arguments: Sequence[str]) -> None:
    """Run the file that ``arguments`` name, before the forms of options ask for its members and tasks."""
    if (path := _value_of("--import", arguments)) is not None:
        import_file(path)


def named_tasks(arguments: Sequence[str]) -> list[str]:
    """Return a list with the task that ``--task``, a member or a run folder in ``arguments`` names, or an empty list.
    This does not import PyTorch."""
    if (task := _value_of("--task", arguments)) is not None:
        return [task]
    for argument in arguments:
        if argument in FAMILY:
            return [FAMILY[argument].usual_task]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [str(json.loads((Path(argument) / "config.json").read_text(encoding="utf-8"))["task"]["name"])]
    return []


def _today(argument: str, valid_names: Collection[str]) -> str:
    """Return an ``argument`` with the name of today for an option's former name."""
    flag, *value = argument.split("=", 1)
    if not flag.startswith("--"):
        return argument
    name = today(flag[2:].replace("-", "_"), [valid.replace("-", "_") for valid in valid_names])
    return "=".join((f"--{_flag(name)}" if name in FORMER.values() else flag, *value))


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value of an option in ``arguments``; None without the option."""
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None


def sentence(box: str, prog: str) -> str:
    """Return the parser's message, a printed ``box``, as one sentence that points to the help. Tyro's only structured
    form of these messages is the private and unstable ``tyro._errors``, so this function reads the printed box, whose
    frame follows the terminal's encoding. ``tests/cli/test_main.py`` tests it with the version in ``constraints.txt``.
    A box of another form would give a longer sentence, but not lose the message."""
    rows = [row.strip("│").rstrip() for row in box.strip("\n").splitlines()]
    rows = rows[1:-1] if box.startswith("╭") else rows[2:]
    message, *hints = re.split(r"\n[─-]{3,}\n", textwrap.dedent("\n".join(rows)).strip("\n"))
    if message.startswith("Missing from"):
        text = "needs " + " and ".join(re.findall(r"^ {4}(\S.*)$", message, re.MULTILINE))
    else:
        text = " ".join(message.split("\n\n")[0].split()).rstrip(".").removeprefix("Error parsing ")
        text = text.removeprefix("Options: ")
    if choice := re.fullmatch(r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)", text):
        names = sorted(set(re.findall(r"'([^']*)'", choice[3])) - {"None"})
        text = f"{choice[2]}: {choice[1]} is not one of {', '.join(names)}"
    if lacking := re.fullmatch(r"Missing value for argument '(?:\(')?([^']*).*'\. Expected .*", text):
        text = f"{lacking[1]}: needs a value"
    near = [name for hint in hints if "meant" in hint for name in re.findall(r"^ {4}(--[\w-]+)", hint, re.MULTILINE)]
    remedy = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else f"see {prog} --help."
    return f"{prog.removeprefix('kinformer ')}: {text}; {remedy}"


# ``--config run.toml``: options by name in a file.
#
# member = "gpt"
# data = "book.txt"
# batch_size = 16
# set = {dim = 256, "layers.*.dropout" = 0.1}


def read(path: str, valid_names: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Read a file of options, and return its positional arguments by name and its options as command-line arguments.
    ``valid_names`` maps the names of all options and positional arguments to their types."""
    require_file(Path(path))
    try:
        settings = parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KinformerError(f"--config {path}: cannot be read ({error.strerror}); give a TOML file.") from None
    except ValueError as error:
        raise KinformerError(f"--config {path}: is not TOML ({error}); write name = value in each line.") from None
    positional: dict[str, object] = {}
    arguments: list[str] = []
    for name, value in settings.items():
        flag = _today(f"--{name.replace('_', '-')}", valid_names)[2:]
        if name in RARE and "set" in valid_names:
            raise KinformerError(f'{path}: {name!r} is rarely changed; write set = {{"training.{name}" = {value}}}.')
        if flag not in valid_names or flag == "config":
            raise KinformerError(f"{path}: {name!r} is not an option; {nearest(flag, set(valid_names) - {'config'})}")
        place, hint = f"{path}: {name}", bare(valid_names[flag])
        items = value if isinstance(value, list) else [value]
        if is_positional(valid_names[flag]):
            values = [_text(place, item) for item in items]
            positional[flag.replace("-", "_")] = tuple(values) if hint == tuple[str, ...] else " ".join(values)
        elif hint is bool:
            if not isinstance(value, bool):
                raise KinformerError(f"{place} is {value!r} but must be true or false.")
            arguments += [f"--{flag}"] * value
        elif isinstance(value, dict):
            texts = (item if isinstance(item, str) else json.dumps(item) for item in value.values())
            arguments += [f"--{flag}={key}={text}" for key, text in zip(value, texts, strict=True)]
        else:
            arguments += [f"--{flag}={_text(place, item)}" for item in items]
    return positional, arguments


def _text(place: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise KinformerError(f"{place} is {value!r} but must be a text or a number.")
    return str(value)


# Names of options in other tools: the error for such a name recommends the option of this command.

OPTIONS = {
    theirs: ours
    for ours, names in {
        "lr": "learning-rate",
        "batch-size": "batch bs sentences rows",
        "max-new-tokens": "max-tokens num-tokens",
        "steps": "max-steps num-steps iterations iters max-iters",
        "out": "output output-dir save-dir",
        "length": "max-length seq-len sequence-length block-size context-length context",
        "data": "dataset input",
        "weight-decay": "wd",
        "warmup": "warmup-steps",
        "optimizer": "optim",
        "clip": "grad-clip",
        "precision": "dtype",
        "devices": "gpus",
        "for": "plan use",
        "validate-every": "eval-every",
        "checkpoint-every": "save-every",
        "prompt": "text",
        "temperature": "temp",
        "samples": "num-samples",
        "first": "images max-samples",
    }.items()
    for theirs in names.split()
}
"""A name in another tool -> the option here. The suggestion is made if the command has this option."""

MODEL = {
    theirs: ours
    for ours, names in {
        "dim": "dim d-model hidden-size embed-dim n-embd",
        "dropout": "dropout",
        "layers": "layers num-layers n-layers n-layer depth",
        "layers.*.mixer.num_heads": "heads num-heads n-heads n-head",
        "input.vocab_size": "vocab-size",
    }.items()
    for theirs in names.split()
}
"""A name in another tool -> the path in a member's config. The suggestion is made if the command takes ``--set``."""

SENTENCES = {
    **dict.fromkeys(("epochs", "epoch"), ("steps", "training does not count epochs; give --steps N or --minutes N.")),
    **dict.fromkeys(("bf16", "fp16"), ("precision", "give --precision bf16-mixed.")),
    **dict.fromkeys(("gpu", "cuda"), ("device", "give --device cuda.")),
    "cpu": ("device", "give --device cpu."),
}
"""A name in another tool -> an option, and a sentence. The sentence is shown if the command has this option."""


def suggestion(arguments: Sequence[str], valid_names: Collection[str]) -> str | None:
    """Return a sentence about the first option in ``arguments`` that other tools use for a valid name, or None."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.removeprefix("--").partition("=")
        name = name.replace("_", "-").lower()
        if not argument.startswith("--") or name in valid_names:
            continue
        after = arguments[index + 1] if index + 1 < len(arguments) else "--"
        value = value or ("" if after.startswith("--") else after)
        flag_text = f"--{name} {value}".rstrip()
        if name in SENTENCES and SENTENCES[name][0] in valid_names:
            return f"{flag_text}: {SENTENCES[name][1]}"
        if name in OPTIONS and OPTIONS[name] in valid_names:
            return f"{flag_text}: did you mean --{OPTIONS[name]}?"
        if name.replace("-", "_") in RARE and {"set", "steps", "member"} <= set(valid_names):
            change = f"training.{name.replace('-', '_')}={value or 'VALUE'}"
            return f"{flag_text}: is a rarely changed setting; give --set {change}."
        if name in MODEL and "set" in valid_names:
            return f"{flag_text}: is not an option but part of the model; give --set {MODEL[name]}={value or 'VALUE'}."
    return None
