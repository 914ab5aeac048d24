"""A page for every member."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import torch

from generator import commands, gallery
from generator.block import drawing
from generator.facts import RECIPE, config_of, facts, flops_chart, recipe_parameters, state_chart
from generator.member_values import shown, values_of
from generator.results import Result, results
from generator.text import escaped, figure, html, literal, page, papers, table, write
from generator.typeset import typeset
from kinformer.core.config import parts_in
from kinformer.family.record import Member
from kinformer.family.table import MEMBERS
from kinformer.lab.cli.family import COSTS, GROWTHS, setting_rows
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.panels import Panel
from kinformer.lab.drawing.pictures import draw_panels
from kinformer.lab.drawing.subject import find
from kinformer.lab.drawing.text import formulas, symbols
from kinformer.lab.training.logging import flops, size
from kinformer.runtime.errors import KinformerError

MOST_PANELS = 6


def generate(docs: Path) -> None:
    """Write the pages and their pictures into ``docs/members``."""
    for member in MEMBERS.values():
        write_member(docs / "members", member)
    write(docs / "members" / "parity.txt", parity_table())
    gallery.generate(docs)


def parity_table() -> str:
    """Return a row for every thing that a member was held to."""
    rows = [
        [f"[`{name}`](members/{name}.md)", escaped(text)] for name, member in MEMBERS.items() for text in member.parity
    ]
    return table(("member", "held to (test)"), rows)


def write_member(folder: Path, member: Member) -> None:
    """One page with its pictures."""
    told = draw_patterns(folder, member.name)
    for result in measured(member.name):
        for picture in result.pictures[:1]:
            target = folder / picture.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(picture.read_bytes())
    write(folder / f"{member.name}.md", member_page(member, told))


def draw_patterns(folder: Path, name: str) -> str:
    """Draw its patterns and positions into ``name.png``; returns what is seen there, or nothing."""
    torch.manual_seed(0)
    try:
        subject = find(DrawOptions(subject=name))
    except KinformerError:
        return ""
    panels = subject.panels()[:MOST_PANELS]
    if panels:
        folder.mkdir(parents=True, exist_ok=True)
        draw_panels(panels, subject.title, folder / f"{name}.png")
    return "; ".join(map(_seen, panels))


def _seen(panel: Panel) -> str:
    return ", ".join(part.replace("\n", ", ") for part in (panel.place, panel.name) if part)


def member_page(member: Member, drawn: str) -> str:
    """The page as Markdown; ``drawn`` says what its picture shows."""
    config = config_of(member.name)
    title = f"(member-{member.name})=\n# {escaped(member.title)}"
    return page(
        title,
        *_annotated(member),
        *_choice(member),
        literal(_one_line(member, config), "python"),
        _record(member, config),
        "## What it computes",
        *_formulas(config),
        "## The model",
        html(drawing(config)),
        f"Recipe `{RECIPE}`. The parts: {part_links(config)}.",
        _details(
            "All settings", literal("\n".join(line for line, _ in setting_rows(config, "", brief=True, explain=False)))
        ),
        *_patterns(member, drawn),
        "## Fact sheet",
        *_sheet(member),
        "## Against the paper",
        *_paper(member),
        *_measured(member),
        "## Train it",
        *_training(member, config),
    )


def _annotated(member: Member) -> Iterator[str]:
    """A link to the page that explains it."""
    from generator import annotated

    if found := annotated.page_of(member.name):
        yield f"**Understand it:** [{found.title}](../annotated/{found.name}.md), one page of plain PyTorch."


def _choice(member: Member) -> Iterator[str]:
    """When to take it and when not."""
    if member.use_when:
        yield f"**Take it when** {escaped(member.use_when)}."
    if member.avoid_when:
        yield f"**Not when** {escaped(member.avoid_when)}."


def _one_line(member: Member, config: Any) -> str:
    """Its layer in a model of one's own."""
    comment = "causal" if member.causal else "whole sequences"
    return f'y = kinformer.layer("{member.name}", dim=512)(x)  # x, y: [batch, time, 512]; {comment}'


def _record(member: Member, config: Any) -> str:
    task = commands.usual_task(member, config)
    reads = "a source, then token by token" if config.kind == "encoder_decoder" else "chunk by chunk, causal"
    rows = [
        ("Name", f"`{member.name}`"),
        ("Paper", papers(escaped(member.paper))),
        ("Changes", ", ".join(member.axes) or "nothing"),
        ("Reads", reads if member.causal else "whole texts at once"),
        ("Operations grow", COSTS[member.growth_of_cost]),
        ("State", GROWTHS[member.growth]),
        ("Task", f"[{task.title}](../tasks/{task.name}.md)"),
        ("One layer", "[a plain `nn.Module`](../layer.md)"),
    ]
    return table(("", ""), [(f"**{name}**", value) for name, value in rows])


def _formulas(config: Any) -> Iterator[str]:
    for formula in formulas(config):
        kind = formula.slot.replace("encoder_mixer", "mixer").replace("_", " ")
        yield f"**{kind} `{formula.kind}`.** {papers(escaped(formula.says))}"
        if formula.lines:
            yield html(typeset(formula.lines))
    sizes = ", ".join(f"{escaped(symbol)} = `{name}` = {value}" for symbol, name, value in symbols(config))
    yield f"Shapes: x and y are \\[batch, time, {config.dim}\\]; {sizes}."


def part_links(config: Any) -> str:
    """Every part of the config that has a page, linked to it."""
    found: dict[tuple[str, str], None] = {}
    for part in parts_in(config):
        if part.slot and part.kind and part.slot not in ("model", "layer", "encoder_layer") and part.kind != "none":
            found[(part.slot, part.kind)] = None
    return ", ".join(
        f"[{slot.replace('_', ' ')} {kind}](#part-{slot}-{kind})".replace("_", "-") for slot, kind in found
    )


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n\n{text}\n\n</details>"


def _patterns(member: Member, drawn: str) -> Iterator[str]:
    if drawn:
        yield "## Who sees whom, and where"
        yield figure(f"{member.name}.png", drawn, f"`kinformer draw {member.name}`: {escaped(drawn)}.")


def _sheet(member: Member) -> Iterator[str]:
    known = facts(member.name)
    rows = [(f"`{name}`", f"{count:,}", str(dim), str(depth)) for name, count, dim, depth in recipe_parameters(member)]
    yield table(("recipe", "parameters", "width", "layers applied"), rows, (1, 2, 3))
    if known.costs:
        yield f"One row of the recipe `{RECIPE}`, in float32, by `kinformer estimate {member.name} --length N`:"
        costs = [
            (
                f"{cost.length:,}",
                flops(cost.flops),
                flops(cost.training),
                size(cost.activations),
                size(cost.state) if member.causal else "none",
            )
            for cost in known.costs
        ]
        header = ("tokens", "FLOPs per token at inference", "in a training forward", "kept for the backward", "state")
        yield table(header, costs, (0, 1, 2, 3, 4))
    charts = [
        f"<figure><figcaption>{caption}</figcaption>{chart}</figure>"
        for caption, chart in (
            ("Bytes of the state of one row, by tokens absorbed", state_chart(member.name)),
            ("FLOPs of a forward at inference per token, by length", flops_chart(member.name)),
        )
        if chart
    ]
    if charts:
        legend = f"<b>●</b> {member.name} <i>■</i> plain attention (rope)" if member.name != "rope" else ""
        yield html(f'<div class="charts">{"".join(charts)}</div><p class="key">{legend}</p>')
    if known.limit:
        yield f"Its positions end at {known.limit:,} tokens; `--set` makes them longer."


def _paper(member: Member) -> Iterator[str]:
    yield f"**Exact limit.** {escaped(member.exact_limit)}."
    if member.parity:
        yield "**Parity**, with the same weights:"
        yield "\n".join(f"- {escaped(each)}" for each in member.parity)
    if member.departures:
        yield "**Departures:**"
        yield "\n".join(f"- {escaped(each)}" for each in member.departures)


def measured(name: str) -> list[Result]:
    """The result files that name the member, or that its record names."""
    named = MEMBERS[name].results
    return [result for result in results() if name in result.members or result.name in named]


def _measured(member: Member) -> Iterator[str]:
    found = measured(member.name)
    if not found:
        return
    yield "## Measured"
    rows = [
        (f"[{result.question}](../results/{result.name}.md)", value.unit, value.condition, shown(value.value), plain)
        for result in found
        for value in values_of(result, member.name)
        for plain in [f"{shown(value.plain[1])} ({value.plain[0]})" if value.plain else ""]
    ]
    if rows:
        yield table(("question", "figure", "at", member.name, "beside"), rows, (3, 4))
    for result in found:
        yield f"**{result.question}** {result.verdict} ([details](#result-{result.name}); {result.date})"
        for picture in result.pictures[:1]:
            yield figure(picture.name, f"Plots. {result.verdict}".replace("`", ""))


def _training(member: Member, config: Any) -> Iterator[str]:
    yield literal("\n".join(commands.training(member, config)), "sh")
    others = ", ".join(f"[{task.title}](../tasks/{task.name}.md)" for task in commands.other_tasks(member, config))
    if others:
        yield f"By `--task`, models like it also learn: {others}."
    build = f'model = kinformer.build("{member.name}", recipe="{RECIPE}")'
    yield "In Python, the model alone is"
    yield literal(f"import kinformer\n\n{build}", "python")
