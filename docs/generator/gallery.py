"""The gallery: a card for every member, with filters by what it changes, what it costs and what it is for."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from generator import commands
from generator.card import legend, picture, row
from generator.facts import config_of, facts
from generator.text import contents, escaped, html, page, table, write
from kinformer.family.record import Member
from kinformer.family.table import MEMBERS
from kinformer.lab.cli.family import COSTS, GROWTHS
from kinformer.lab.training.logging import flops

FIRST = ("rope", "local", "gated-deltanet", "reformer")
"""The row of cards on the site's first page and in README."""
FILTERS = """<script>
(() => {
  const form = document.querySelector("form.filters"), cards = [...document.querySelectorAll(".gallery a.card")];
  form.hidden = false;
  form.addEventListener("change", () => {
    const wanted = [...new FormData(form)].filter(([, value]) => value);
    for (const card of cards)
      card.hidden = !wanted.every(([name, value]) => card.dataset[name].split("|").includes(value));
    form.querySelector("output").textContent = `${cards.filter(card => !card.hidden).length} of ${cards.length}`;
  });
  form.addEventListener("submit", event => event.preventDefault());
})();
</script>"""


def generate(docs: Path) -> None:
    """Write the gallery's page, and its first row for the site's first page."""
    write(docs / "members" / "index.md", gallery())
    first = [MEMBERS[name] for name in FIRST]
    write(docs / "members" / "first_row.txt", html(_cards(first, "members/")))
    write(docs / "gallery.svg", row(first))


def gallery() -> str:
    """All members as one sheet."""
    rows = [
        (
            f"[{member.name}]({member.name}.md)",
            escaped(member.title),
            str(member.year),
            ", ".join(member.axes) or "-",
            member.growth,
            member.growth_of_cost,
            flops(known.costs[-1].flops) if (known := facts(member.name)).costs else "-",
        )
        for member in MEMBERS.values()
    ]
    return page(
        "# The family",
        f"{len(MEMBERS)} members, each with its page: when to take it, formulas, a drawing of its block and of its "
        "pattern, what it costs, how it departs from its paper, what was measured of it and how to train it. On the "
        "command line, `kinformer list --by axis` gives the same as a tree.",
        html(legend() + sheet()),
        "## As a table",
        "FLOPs are those of a forward at inference per token at the longest length of its page (4,096 tokens unless "
        "positions or inputs end before), recipe `small`.",
        table(("member", "title", "year", "changes", "state growth", "cost growth", "FLOPs per token"), rows, (2, 6)),
        contents(*MEMBERS),
    )


def sheet() -> str:
    """The cards of all members under their filters, as HTML."""
    return f"{_filters()}{_cards(MEMBERS.values(), '')}{FILTERS}"


def _cards(members: Iterable[Member], folder: str) -> str:
    return f'<div class="gallery">{"".join(_card(member, folder) for member in members)}</div>'


def _card(member: Member, folder: str) -> str:
    changes = ", ".join(member.axes) or "the plain Transformer"
    data = " ".join(f'data-{name}="{escape("|".join(values))}"' for name, values in _traits(member).items())
    return (
        f'<a class="card" href="{folder}{member.name}.html" {data}><b>{escape(member.title)}</b>{picture(member)}'
        f"<span>{member.year} · {escape(changes)}<br>state: {escape(GROWTHS[member.growth])}</span></a>"
    )


def _traits(member: Member) -> dict[str, list[str]]:
    """What the filters ask for."""
    config = config_of(member.name)
    return {
        "axis": list(member.axes) or ["nothing"],
        "cost": [COSTS[member.growth_of_cost]],
        "state": [GROWTHS[member.growth]],
        "task": [task.title for task in (commands.usual_task(member, config), *commands.other_tasks(member, config))],
    }


def _filters() -> str:
    """One choice for every trait; hidden where no script runs."""
    titles = {"axis": "changes", "cost": "operations grow", "state": "state grows", "task": "can be trained for"}
    choices = []
    for name, title in titles.items():
        values = dict.fromkeys(value for member in MEMBERS.values() for value in _traits(member)[name])
        options = "".join(f"<option>{escape(value)}</option>" for value in values)
        choices.append(f'<label>{title} <select name="{name}"><option value="">any</option>{options}</select></label>')
    count = f"{len(MEMBERS)} of {len(MEMBERS)}"
    return f'<form class="filters" hidden>{"".join(choices)}<output aria-live="polite">{count}</output></form>'
