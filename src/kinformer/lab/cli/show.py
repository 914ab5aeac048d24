"""``kinformer show MEMBER|DIR``: its record, config, parameters, state size and attention pattern."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.family.table import FAMILY, member
from kinformer.lab.cli.options import Changes, CommonOptions, Member
from kinformer.lab.cli.output import print_json, print_table, runs
from kinformer.lab.cli.parsing import overrides
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import plural, require
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from kinformer.core.config import Config
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.runs.describe import Description, DescriptionFacts

MAX_PICTURES = 8
MAX_COLUMN, NARROW = 38, 64
"""Columns of settings, beyond which a meaning begins on the line below; in narrower terminals all do."""
DEFAULTS = ""


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Tell all about one member without computing anything."""

    member: Member
    """The member's name, as in kinformer list, or a run folder, whose own config is shown then."""
    recipe: str | None = None
    """Which of the member's recipes (small if not given)."""
    set: Changes = ()
    """Change the recipe, as in --set layers.*.mixer.num_heads=8; may be given again."""
    vocab_size: int | None = None
    """Tokens of the vocabulary; the recipe's own if not given."""
    brief: bool = False
    """Only name the settings that are at their defaults."""
    explain: bool = False
    """Say behind each setting what it means; with --brief only of those that are not at their defaults."""

    def __post_init__(self) -> None:
        require("vocab_size", self.vocab_size, 1)
        super().__post_init__()


def run(options: Options) -> int:
    """Print the member or run and return the exit status."""
    if options.member in FAMILY or not (Path(options.member).is_dir() or "/" in options.member):
        member(options.member)  # an unknown name is an error before PyTorch is imported
    from kinformer.lab.runs.describe import describe

    described = describe(options.member, options.recipe, options.vocab_size, overrides(options.set))
    if options.json:
        print_json({**described.facts, **_meanings(described.config)} if options.explain else described.facts)
    else:
        _print(described.facts, _config_lines(described, options))
    return 0


def _meanings(config: ModelConfig) -> dict[str, object]:
    from kinformer.family.settings import meanings_in

    return {"meanings": meanings_in(config)}


def _config_lines(described: Description, options: Options) -> Iterator[str]:
    if not options.explain:
        return tree(folded(described.config) if options.brief else described.facts["config"], "  ")
    return explained(described.config, shutil.get_terminal_size((100, 24)).columns, options.brief)


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
    total = page["parameters"]["total"]
    active = page["parameters"]["active"]
    print(f"\nparameters: {total:,}{f', of which one token uses {active:,}' if active < total else ''}")
    print_table(("part", "parameters"), [(part, f"{n:,}") for part, n in page["parameters"]["parts"].items()], (1,))
    _print_state(page)
    for picture in page["patterns"][:MAX_PICTURES]:
        scale = "" if picture["tokens_per_cell"] == 1 else f", {plural(picture['tokens_per_cell'], 'token')} to a cell"
        print(f"\npattern {picture['pattern']} (queries down, keys across{scale})")
        print("\n".join(f"  {row}" for row in picture["rows"]))
    if (more := len(page["patterns"]) - MAX_PICTURES) > 0:
        print(f"\nand {more} more; see them all with: kinformer draw {page['name']} --recipe {page['recipe']}")


def _print_training(training: JsonObject) -> None:
    """Print the settings of training that hold unless others are given, and the stages, one a line."""
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
    """Print what the model computes, and its sizes in papers' symbols and ours."""
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


def folded(config: Config) -> dict[str, object]:
    """Return a config's dict form in which settings at their defaults are only named, under the key DEFAULTS."""
    from kinformer.core.config import field_types, tags

    field_by_name = {field.name: field for field in fields(config)}  # type: ignore[arg-type]
    same = [name for name in field_types(type(config)) if getattr(config, name) == field_by_name[name].default]
    shown = {name: _folded(getattr(config, name)) for name in field_types(type(config)) if name not in same}
    return {**tags(config), **shown, **({DEFAULTS: ", ".join(same)} if same else {})}


def _folded(value: object) -> object:
    from kinformer.core.config import Config

    if isinstance(value, tuple):
        return [_folded(item) for item in value]
    return folded(value) if isinstance(value, Config) else value


def tree(config: Mapping[str, object], indent: str) -> Iterator[str]:
    """Yield a config's dict form as indented lines; equal neighbours in a list are listed once."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield f"{indent}{name}: {value.get('kind', '')}".rstrip()
            yield from tree(_without_kind(value), indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for first, last, item in runs(value):
                layers = str(first) if first == last else f"{first} to {last}"
                yield f"{indent}{name} {layers}: {item.get('kind', '')}".rstrip()
                yield from tree(_without_kind(item), indent + "  ")
        elif name == DEFAULTS:
            yield textwrap.fill(f"{indent}(at their defaults: {value})", 100, subsequent_indent=f"{indent} ")
        elif name != "kind":
            yield f"{indent}{name} = {value}"


def _without_kind(value: dict[str, object]) -> dict[str, object]:
    return {name: item for name, item in value.items() if name != "kind"}


def explained(config: Config, width: int, brief: bool = False) -> Iterator[str]:
    """Yield the lines of ``config`` with meanings, at most ``width`` columns wide where words allow; with ``brief``
    without the settings that are at their defaults."""
    rows = list(_rows(config, "  ", brief))
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


def _rows(config: Config, indent: str, brief: bool) -> Iterator[tuple[str, str]]:
    """Yield each setting, indented, and its meaning; equal neighbours in a list are listed once."""
    from kinformer.core.config import Config, field_types, tags, to_dict
    from kinformer.family.settings import meaning

    if (package := tags(config).get("package")) is not None:
        yield f"{indent}package = {package}", ""
    defaults = {field.name: field.default for field in fields(config)}  # type: ignore[arg-type]
    for name in field_types(type(config)):
        value, text = getattr(config, name), meaning(type(config), name)
        if brief and value == defaults[name]:
            continue
        if isinstance(value, Config):
            yield f"{indent}{name}: {value.kind}".rstrip(), text
            yield from _rows(value, f"{indent}  ", brief)
        elif isinstance(value, tuple) and value and isinstance(value[0], Config):
            for first, last, item in runs(value):
                numbers = str(first) if first == last else f"{first} to {last}"
                yield f"{indent}{name} {numbers}: {item.kind}".rstrip(), text
                yield from _rows(item, f"{indent}  ", brief)
        else:
            yield f"{indent}{name} = {to_dict(value)}", text
