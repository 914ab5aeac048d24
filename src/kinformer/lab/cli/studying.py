"""The commands that weigh members against each other: estimate, compare and bench."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from kinformer.lab.cli.form import CommonOptions
from kinformer.lab.cli.output import BEGUN, print_json, print_table
from kinformer.lab.comparison.options import BenchOptions, CompareOptions
from kinformer.lab.estimation.options import EstimateOptions
from kinformer.lab.tasks.evaluation import TextTable
from kinformer.lab.training.logging import flops, size
from kinformer.runtime.errors import plural

if TYPE_CHECKING:
    from kinformer.lab.comparison import bench as timing
    from kinformer.lab.runs.describe import ClusterEstimate, MemberEstimate

Members = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER")]


@dataclass(frozen=True, kw_only=True)
class Estimate(EstimateOptions, CommonOptions):
    """Estimate parameters, FLOPs, training and inference memory of a member, by part and in all."""

    def run(self) -> int:
        """Print the estimate, and return the exit status."""
        from kinformer.lab.runs.describe import estimate_member

        result = estimate_member(self)
        if self.json:
            print_json(asdict(result))
        else:
            _show(self, result)
        return 0


def _show(options: Estimate, result: MemberEstimate) -> None:
    rows = f"{plural(result.batch_size, 'row')} of {plural(result.length, 'token')}"
    print(f"{options.member} ({result.recipe}), {rows}, {options.precision}, {options.optimizer}\n")
    _print_parts(result)
    print()
    for amounts, title in (
        (result.memory["train"], "training"),
        (result.peak, "peak of a process that trains on a CPU, about"),
        (result.memory["inference_fp32"], "inference in float32"),
        (result.memory["inference_bf16"], "inference in bfloat16"),
    ):
        terms = " + ".join(f"{size(amount)} {what}" for what, amount in amounts.items())
        print(f"{title}: {size(sum(amounts.values()))} = {terms}")
    print()
    if result.cluster is not None:
        _print_cluster(result.cluster, options)
    if rules := result.rules_of_thumb:
        print(
            f"rules of thumb: {plural(rules.parameters, 'parameter')} (V E + 12 L E^2), {flops(rules.flops_step)} a "
            f"step (6 a parameter and token),\n{size(rules.activation_bytes)} activations (B T L (14 E + T N) "
            f"numbers; T N are scores, which tiled attention never stores), {size(rules.train_bytes)} in training"
        )


def _print_cluster(cluster: ClusterEstimate, options: Estimate) -> None:
    print(f"training on devices like {options.hardware} ({cluster.device.source}), a device each:")
    header = ("devices", "--parallel", "--accumulate", "memory", "fits", "sent, data", "sent, rows", "ideal step")
    rows = []
    for devices, costs in cluster.meshes.items():
        for cost in costs if len(cluster.meshes) == 1 else costs[:1]:
            fits = "yes" if cost.fits else "no"
            sent = size(cost.data_bytes), size(cost.tensor_bytes + cost.context_bytes)
            time = f"{cost.step:.2g} s", _two_digits(cost.tokens_per_second)
            rows.append((f"{devices:,}", cost.mesh, cost.accumulate, size(cost.train_bytes), fits, *sent, *time))
    print_table((*header, "tokens/s"), rows, numeric=(0, 2, 3, 5, 6, 7, 8))
    if any(costs and costs[0].fits and costs[0].mesh.startswith("dp=") for costs in cluster.meshes.values()):
        print("The model fits on one device: --devices N is enough, and devices need not share it.")
    if cluster.refused:
        print(f"More devices a row: {cluster.refused.partition('; leave')[0]}.")
    if not cluster.serving:
        print()
        return
    print(f"\nserving in {options.precision}, the state of rows at their full length:")
    served = []
    for host in cluster.serving:
        amounts = size(host.weights), size(host.state), f"{host.rows:,}", f"{1000 * host.seconds:.2g} ms"
        served.append((host.devices, *amounts, _two_digits(host.tokens_per_second)))
    columns = (
        "devices a row",
        "weights",
        "state of a row",
        "rows that fit",
        "ideal token of a row",
        "tokens/s a device",
    )
    print_table(columns, served, numeric=range(6))
    print()


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def _print_parts(result: MemberEstimate) -> None:
    rows = []
    for row in result.parts:
        work = map(flops, (row.flops_inference, row.flops_forward, row.flops_forward + row.flops_backward))
        rows.append((row.part, f"{row.parameters:,}", *work, size(row.activation_bytes)))
    activations = size(result.memory["train"]["activations"])
    inference, forward, step = map(flops, (result.flops_inference, result.flops_forward, result.flops_step))
    rows.append(("total", f"{result.parameters:,}", inference, forward, step, activations))
    header = ("part", "parameters", "FLOPs inference", "FLOPs forward", "FLOPs step", "activations")
    print_table(header, rows, numeric=(1, 2, 3, 4, 5))
    if result.active_parameters < result.parameters:
        print(f"active parameters (used by one token): {result.active_parameters:,}")
    print("FLOPs: of a forward at inference, of the forward of a training step, and of the training step.")


@dataclass(frozen=True, kw_only=True)
class Compare(CompareOptions, CommonOptions):
    """Compare members by one parameter budget, the same data and order, and a learning rate that suits each.

    A page reports which member is better, the costs, and which differences are not significant.
    """

    members: Members = ()
    """Members, hybrids as linear-transformer:3,gpt:1, or wide=gpt for another name. Without members: five that suit the
    use, on the standard library's sources, in 20 minutes."""
    merge: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE.json")] = ()
    """Train nothing: merge this comparison with the following ones, all of one task and data, as in
    --merge A.json B.json, and report on all."""

    def run(self) -> int:
        """Compare the members, write and print the report, and return 1 if a member is out."""
        from kinformer.lab.comparison.compare import report
        from kinformer.lab.comparison.record import as_json

        command = shlex.join(["kinformer", *sys.argv[1:]])
        written = report(self.members, self, self.merge, command, BEGUN.get())
        self.show(as_json(written.comparison), written.text)
        return int(any(entrant.error for entrant in written.comparison.entrants))


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions, CommonOptions):
    """Time members in turns with plain attention, at several lengths, beside this machine's measured peak.

    A member is not timed if its outputs in chunks differ from its outputs for the whole text, or if it sees later
    tokens.
    """

    members: Members = ()
    """Members of the family; linear-transformer, fast-weights and local if none is given. gpt is always there."""

    def run(self) -> int:
        """Time the members, print the times, and return 1 if a member fails the check of correctness."""
        from kinformer.lab.comparison.bench import bench

        timed = bench(self.members, self)
        self.show(timed.as_json, _text(timed))
        return int(bool(timed.failed))


def _text(timed: timing.Bench) -> Iterator[str | TextTable]:
    from kinformer.lab.comparison.bench import PLAIN, WORK_NAMES, seconds_of
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
        base = seconds_of(timed.timings, PLAIN, work)
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
