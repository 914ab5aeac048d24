"""``kinformer bench [MEMBER...]``: times beside plain attention, after a check of correctness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from kinformer.lab.cli.options import Changes, CommonOptions, options_as
from kinformer.lab.cli.output import print_blocks, print_json
from kinformer.lab.comparison.options import BenchOptions
from kinformer.lab.tasks.evaluation import TextTable
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import plural

if TYPE_CHECKING:
    from kinformer.lab.comparison.bench import Bench


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions, CommonOptions):
    """Time members in turns with plain attention, at several lengths, beside what this machine can do at most. A member
    whose outputs in chunks are not those of the whole, or that sees later tokens, is not timed."""

    members: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER")] = ()
    """Members of the family; linear-transformer, fast-weights and local if none is given. gpt is always there."""
    set: Changes = ()  # type: ignore[assignment]
    """A change to all members, as in --set layers=2; may be given again."""


def run(options: Options) -> int:
    """Time, and print; returns 1 where a member fails the check of correctness."""
    from kinformer.lab.comparison.bench import bench

    timed = bench(options.members, options_as(BenchOptions, options))
    if options.json:
        print_json(timed.as_json)
    else:
        print_blocks(_text(timed))
    return int(bool(timed.failed))


def _text(timed: Bench) -> Iterator[str | TextTable]:
    from kinformer.lab.comparison.bench import PLAIN, WORK_NAMES
    from kinformer.lab.comparison.speed import described

    facts, floor = timed.facts, timed.floor
    yield (
        f"recipe {facts['recipe']}, {facts['batch']} {'row' if facts['batch'] == 1 else 'rows'}, medians of "
        f"{plural(facts['rounds'], 'round')} in turns; {described(timed.machine)}\n"
        f"floor measured here: {floor.flops / 1e9:,.0f} GFLOP/s in float32 products, "
        f"{floor.narrow_flops / 1e9:,.0f} in bfloat16, {floor.bandwidth / 1e9:,.1f} GB/s read, "
        f"{1e6 * floor.operator:.2f} microseconds an operator"
    )
    if facts["peers"]:
        yield "beside them: " + ", ".join(f"{name} ({version})" for name, version in facts["peers"].items())
    for work in dict.fromkeys(item.work for item in timed.timings):
        base = timed.seconds(PLAIN, work)
        rows = []
        for timing in timed.timings:
            if timing.work != work:
                continue
            ratio = f"{base[timing.length] / timing.seconds:.2f}" if timing.length in base else "-"
            share = "-" if timing.share is None else f"{timing.share:.0%}"
            tokens = facts["batch"] * (1 if work == "decode" else timing.length) / timing.seconds
            rows.append((timing.length, timing.member, f"{1000 * timing.seconds:,.2f}", f"{tokens:,.0f}", ratio, share))
        yield f"\n{WORK_NAMES[work]}"
        yield TextTable(("length", "member", "ms", "tokens/s", f"x {PLAIN}", "of floor"), rows, (0, 2, 3, 4, 5))
    if timed.memory:
        yield "\nhighest memory of a training step, above the model itself"
        sizes = sorted({length for item in timed.memory.values() for length in item})
        peaks = [(name, *(size(item[n]) if n in item else "-" for n in sizes)) for name, item in timed.memory.items()]
        yield TextTable(("member", *map(str, sizes)), peaks, range(1, len(sizes) + 1))
    if timed.crossings:
        yield ""
        yield from timed.crossings
    for name, reason in timed.failed.items():
        yield f"{name} is not timed: {reason}"
