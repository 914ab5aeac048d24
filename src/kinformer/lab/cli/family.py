"""The commands that describe the family: list, show and draw. ``list`` does not import PyTorch for members and
tasks."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from kinformer.family.record import Member
from kinformer.family.table import FAMILY, member, members
from kinformer.lab.cli.form import CommonOptions
from kinformer.lab.cli.output import print_json, print_table
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.estimation.options import SubjectOptions
from kinformer.lab.tasks.evaluation import TextTable
from kinformer.lab.tasks.table import tasks
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from kinformer.core.config import Config
    from kinformer.lab.runs.describe import DescriptionFacts


@dataclass(frozen=True, kw_only=True)
class List(CommonOptions):
    """List all members by the growth of their state, with --verbose their titles, or draw them as a tree; or list the
    tasks, or the kinds of parts."""

    what: Annotated[
        Literal["members", "tasks", "parts"], tyro.conf.Positional, tyro.conf.arg(metavar="members|tasks|parts")
    ] = "members"
    """What to list."""
    by: Literal["axis", "cost", "state", "causal", "year"] | None = None
    """Print the family as a tree: by the part that members change (axis), by the growth of their operations (cost) or
    state with the length, by whether members are causal (others read a full sequence at once), or by year."""

    def run(self) -> int:
        """Print the family and return the exit status."""
        if self.what != "members" and self.by is not None:
            raise KinformerError(f"--by {self.by}: groups members, but {self.what} are listed; leave it out.")
        if self.what == "tasks":
            facts = [{"name": task.name, "title": task.title, "metric": task.metrics[0].name} for task in tasks()]
            lines = []
            for task in facts:
                first, *more = _wrapped(task["title"], 40)
                lines += [(task["name"], first, task["metric"]), *(("", line, "") for line in more)]
            return self.show(facts, [TextTable(("task", "title", "metric"), lines)])
        if self.what == "parts":
            from kinformer.family.kinds import kinds

            parts = {slot: list(table) for slot, table in kinds().items()}
            texts = (f"{slot} ({len(names)}): {', '.join(names)}" for slot, names in parts.items())
            return self.show(parts, (textwrap.fill(text, 80, subsequent_indent="  ") for text in texts))
        records = members(lambda sentence: print(f"kinformer: {sentence}", file=sys.stderr))
        groups = None if self.by is None else _groups(records, self.by)
        if self.json:
            print_json(
                [record.facts for record in records]
                if groups is None
                else {name: [record.facts for record in group] for name, group in groups.items()}
            )
            return 0
        if groups is not None:
            _print_tree(groups)
            return 0
        if not self.verbose:
            for title, group in _groups(records, "state").items():
                names = ", ".join(record.name for record in group)
                print(f"{title if title.startswith('no') else f'state {title}'} ({len(group)})")
                print(textwrap.fill(names, 79, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
            print("\nkinformer show MEMBER describes a member, list --verbose has the titles.")
            return 0
        rows = []
        for record in records:
            titles, axes = _wrapped(record.title, 24), _wrapped(", ".join(record.axes) or "-", 18)
            for number, (title, changed) in enumerate(zip_longest(titles, axes, fillvalue="")):
                begin = (record.name, str(record.year), record.growth) if number == 0 else ("", "", "")
                rows.append((*begin, title, changed))
        print_table(("member", "year", "state", "title", "changes"), rows)
        return 0


GROWTHS = {
    "none": "no state: reads whole texts", "constant": "constant", "window": "up to a window",
    "linear": "with every token", "store": "a datastore beside it",
}  # fmt: skip

COSTS = {
    "linear": "in proportion to the length", "between": "between the length and its square",
    "quadratic": "with the square of the length",
}  # fmt: skip


def _groups(records: Sequence[Member], by: str) -> dict[str, list[Member]]:
    """Return the members in groups, in the order of the table; a member with several axes is in several groups."""
    names: dict[str, Callable[[Member], Sequence[str]]] = {
        "axis": lambda record: record.axes or ("nothing",),
        "cost": lambda record: (COSTS[record.growth_of_cost],),
        "state": lambda record: (GROWTHS[record.growth],),
        "causal": lambda record: ("causal" if record.causal else "reads whole texts",),
        "year": lambda record: (str(record.year),),
    }
    groups: dict[str, list[Member]] = {}
    for record in records:
        for name in names[by](record):
            groups.setdefault(name, []).append(record)
    return dict(sorted(groups.items())) if by == "year" else groups


def _print_tree(groups: Mapping[str, Sequence[Member]]) -> None:
    width = max(len(record.name) for group in groups.values() for record in group)
    for name, group in groups.items():
        print(f"{name} ({len(group)})")
        for index, record in enumerate(group):
            branch = "└─" if index == len(group) - 1 else "├─"
            title = record.title
            if len(title) > 68 - width:  # a long title loses its parentheses, then its last words
                title = textwrap.shorten(title.split(" (")[0], 68 - width, placeholder="…")
            print(f"{branch} {record.name:<{width}}  {record.year}  {title}")


def _wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` in lines of at most ``width`` columns, broken between words unless a word is longer."""
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


MAX_PICTURES = 8
MAX_COLUMN, NARROW = 38, 64
"""The most columns of a setting with its meaning behind it, and of a terminal where meanings have their own lines."""


@dataclass(frozen=True, kw_only=True)
class Show(SubjectOptions, CommonOptions):
    """Describe one member or run without computing anything."""

    brief: bool = False
    """Only name the settings with default values."""
    explain: bool = False
    """Explain each setting; with --brief only the settings with other values than their defaults."""

    def run(self) -> int:
        """Print the member or run and return the exit status."""
        if self.member in FAMILY or not (Path(self.member).is_dir() or "/" in self.member):
            member(self.member)  # an unknown name is an error before PyTorch is imported
        from kinformer.family.kinds import meanings_in
        from kinformer.lab.runs.describe import describe

        described = describe(self.member, self.recipe, self.vocab_size, self.set)
        facts, config = described.facts, described.config
        if self.json:
            print_json({**facts, "meanings": meanings_in(config)} if self.explain else facts)
        elif self.explain:
            _print(facts, explained(config, shutil.get_terminal_size((100, 24)).columns, self.brief))
        else:
            _print(facts, (line for line, _ in setting_rows(config, "  ", self.brief, explain=False)))
        return 0


def _print(page: DescriptionFacts, config: Iterable[str]) -> None:
    changes = f" (changes: {', '.join(page['axes'])})" if page["axes"] else ""
    print(f"{page['title']}{changes}\n{page['paper']}\n")
    for title, clause in (("take it when", page["use_when"]), ("not when", page["avoid_when"])):
        if clause:
            print(textwrap.fill(f"{title} {clause}", 100, subsequent_indent="  "))
    print()
    _print_formulas(page)
    for title, text in (("exact limit", page["exact_limit"]), *(("departure", item) for item in page["departures"])):
        print(textwrap.fill(f"{title}: {text}", 100, subsequent_indent="  "))
    print(f"recipes: {', '.join(page['recipes'])}\n\nconfig of {page['name']}, recipe {page['recipe']}")
    print("\n".join(config))
    _print_training(page["training"])
    total, active = page["parameters"]["total"], page["parameters"]["active"]
    print(f"\nparameters: {total:,}{f' (one token uses {active:,})' if active < total else ''}")
    print_table(("part", "parameters"), [(part, f"{n:,}") for part, n in page["parameters"]["parts"].items()], (1,))
    _print_state(page)
    for picture in page["patterns"][:MAX_PICTURES]:
        scale = "" if picture["tokens_per_cell"] == 1 else f", {plural(picture['tokens_per_cell'], 'token')} to a cell"
        print(f"\npattern {picture['pattern']} (queries down, keys across{scale})")
        print("\n".join(f"  {row}" for row in picture["rows"]))
    if (more := len(page["patterns"]) - MAX_PICTURES) > 0:
        print(f"\nand {more} more; see them all with: kinformer draw {page['name']} --recipe {page['recipe']}")


def _print_training(training: JsonObject) -> None:
    """Print the default settings of training, and the stages, one a line."""
    options = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in training.items()}
    stages = options.pop("stages", ())
    if options:
        text = ", ".join(f"{name} = {value}" for name, value in options.items())
        print("\n" + textwrap.fill(f"training unless set otherwise: {text}", 100, subsequent_indent="  "))
    for number, stage in enumerate(stages, start=1):
        named = {name: value for name, value in stage.items() if name != "set"} | stage.get("set", {})
        text = ", ".join(f"{name} = {value}" for name, value in named.items()) or "as the run itself"
        print(textwrap.fill(f"  stage {number}: {text}", 100, subsequent_indent="    ", break_long_words=False))


def _print_formulas(page: DescriptionFacts) -> None:
    """Print the formulas of the model, and its sizes in papers' symbols and ours."""
    for formula in page["computes"]:
        kind = "mixer" if formula["slot"] == "encoder_mixer" else formula["slot"].replace("_", " ")
        says = f"{kind} {formula['kind']}: {formula['says']}"
        print(textwrap.fill(says, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
        for line in formula["lines"]:
            wrapped = textwrap.wrap(line, 96, subsequent_indent="    ", drop_whitespace=False)
            print("\n".join(f"    {part}".rstrip() for part in wrapped))
    sizes = ", ".join(f"{symbol} = {name} = {value}" for name, (symbol, value) in page["symbols"].items())
    wide = page["symbols"]["dim"][1]
    print(textwrap.fill(f"shapes: x and y [batch, time, {wide}]; {sizes}", 100, subsequent_indent="  "), end="\n\n")


def _print_state(page: DescriptionFacts) -> None:
    limit = f"; positions end at {page['max_length']}" if page["max_length"] else ""
    if not page["causal"]:
        print(f"\nno state: it reads whole texts{limit}")
        return
    source = ", over a source of as many tokens" if "encoder" in page["config"] else ""
    print(f"\nstate of one row in float32{source} (growth of the member: {page['growth']}{limit})")
    states = [(length, f"{n:,}", size(n)) for length, n in page["state_bytes"].items()]
    print_table(("tokens", "bytes", ""), states, (0, 1, 2))


def explained(config: Config, width: int, brief: bool = False) -> Iterator[str]:
    """Yield the lines of ``config`` with the meanings of settings, at most ``width`` columns wide, unless a word is
    longer. With ``brief``, settings with default values are left out."""
    rows = list(setting_rows(config, "  ", brief))
    column = min(MAX_COLUMN, max((len(left) for left, _ in rows), default=0)) + 2
    for left, text in rows:
        behind = len(left) + 2 <= column and width >= NARROW
        indent = " " * (column if behind else len(left) - len(left.lstrip()) + 4)
        lines = textwrap.wrap(text, max(width, len(indent) + 20), initial_indent=indent, subsequent_indent=indent)
        if behind and lines:
            yield left.ljust(column) + lines.pop(0)[column:]
        else:
            yield left
        yield from lines


def setting_rows(config: Config, indent: str, brief: bool, explain: bool = True) -> Iterator[tuple[str, str]]:
    """Yield each setting, indented, and its meaning; equal neighbours in a list are listed once. With ``brief``,
    settings with default values are left out. Without ``explain`` there are no meanings, and with ``brief`` a last line
    then names the settings that were left out."""
    from kinformer.core.config import Config, field_types, tags, to_dict
    from kinformer.family.kinds import meaning

    if (package := tags(config).get("package")) is not None:
        yield f"{indent}package = {package}", ""
    defaults, same = {field.name: field.default for field in fields(config)}, []
    for name in field_types(type(config)):
        value, text = getattr(config, name), meaning(type(config), name) if explain else ""
        if brief and value == defaults[name]:
            same.append(name)
        elif isinstance(value, Config):
            yield f"{indent}{name}: {value.kind}".rstrip(), text
            yield from setting_rows(value, f"{indent}  ", brief, explain)
        elif isinstance(value, tuple) and value and isinstance(value[0], Config):
            first = 0
            for item, equal in groupby(value):
                last = first + len(list(equal)) - 1
                numbers = str(first) if first == last else f"{first} to {last}"
                yield f"{indent}{name} {numbers}: {item.kind}".rstrip(), text
                yield from setting_rows(item, f"{indent}  ", brief, explain)
                first = last + 1
        else:
            yield f"{indent}{name} = {to_dict(value)}", text
    if same and not explain:
        line = f"{indent}(at their defaults: {', '.join(same)})"
        yield textwrap.fill(line, 100, subsequent_indent=f"{indent} "), ""


@dataclass(frozen=True, kw_only=True)
class Draw(DrawOptions, CommonOptions):
    """Draw who sees whom, and where things are: heads and layers side by side where they differ, once where not."""

    def run(self) -> int:
        """Draw the picture, print its file name, and return the exit status."""
        from kinformer.lab.drawing.subject import draw

        drawing = draw(self)
        return self.show(drawing.facts, ["\n  ".join([f"{drawing.out}: {drawing.title}", *drawing.lines])])
