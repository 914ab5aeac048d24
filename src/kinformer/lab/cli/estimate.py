"""``kinformer estimate MEMBER``: what a model costs, before anything is run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kinformer.lab.cli.options import Changes, CommonOptions, Member, options_as
from kinformer.lab.cli.output import print_json, print_table
from kinformer.lab.estimation.options import EstimateOptions
from kinformer.lab.training.logging import flops, size
from kinformer.runtime.errors import plural

if TYPE_CHECKING:
    from kinformer.lab.runs.describe import ClusterEstimate, MemberEstimate


@dataclass(frozen=True, kw_only=True)
class Options(EstimateOptions, CommonOptions):
    """Parameters, FLOPs, training and inference memory of a member, by part and in all, before anything is run."""

    member: Member
    """A member of the family (see: kinformer list), or a run folder."""
    set: Changes = ()  # type: ignore[assignment]
    """A change to the recipe, as in --set layers=6 or --set layers.*.mixer.num_heads=8; may be given again."""


def run(options: Options) -> int:
    """Print the estimate; returns the exit status."""
    from kinformer.lab.runs.describe import estimate_member

    result = estimate_member(options_as(EstimateOptions, options))
    if options.json:
        print_json(asdict(result))
    else:
        _show(options, result)
    return 0


def _show(options: Options, result: MemberEstimate) -> None:
    rows = f"{plural(result.batch_size, 'row')} of {plural(result.length, 'token')}"
    print(f"{options.member} ({result.recipe}), {rows}, {options.precision}, {options.optimizer}\n")
    _print_parts(result)
    print(_memory(result))
    if result.cluster is not None:
        _print_cluster(result.cluster, options)
    if rules := result.rules_of_thumb:
        print(
            f"rules of thumb: {plural(rules.parameters, 'parameter')} (V E + 12 L E^2), {flops(rules.flops_step)} a "
            f"step (6 a parameter and token),\n{size(rules.activation_bytes)} activations (B T L (14 E + T N) "
            f"numbers; T N are scores, which tiled attention never stores), {size(rules.train_bytes)} in training"
        )


def _print_cluster(cluster: ClusterEstimate, options: Options) -> None:
    print(f"training on devices like {options.hardware} ({cluster.device.source}), a device each:")
    header = ("devices", "--parallel", "--accumulate", "memory", "fits", "sent, data", "sent, rows", "step", "tokens/s")
    rows = []
    for devices, costs in cluster.meshes.items():
        for cost in costs if len(cluster.meshes) == 1 else costs[:1]:
            fits = "yes" if cost.fits else "no"
            sent = size(cost.data_bytes), size(cost.tensor_bytes + cost.context_bytes)
            time = f"{cost.step:.3g} s", f"{cost.tokens_per_second:,.0f}"
            rows.append((f"{devices:,}", cost.mesh, cost.accumulate, size(cost.train_bytes), fits, *sent, *time))
    print_table(header, rows, numeric=(0, 2, 3, 5, 6, 7, 8))
    if cluster.refused:
        print(f"More devices a row: {cluster.refused.partition('; leave')[0]}.")
    if not cluster.serving:
        print()
        return
    print(f"\nserving in {options.precision}, the state of rows at their full length:")
    served = [
        (
            f"{cost.devices}",
            size(cost.weights),
            size(cost.state),
            f"{cost.rows:,}",
            f"{1000 * cost.seconds:.3g} ms",
            f"{cost.tokens_per_second:,.0f}",
        )
        for cost in cluster.serving
    ]
    columns = ("devices a row", "weights", "state of a row", "rows that fit", "a token of one row", "tokens/s a device")
    print_table(columns, served, numeric=(0, 1, 2, 3, 4, 5))
    print()


def _print_parts(result: MemberEstimate) -> None:
    rows = [
        (
            row.part,
            f"{row.parameters:,}",
            flops(row.flops_inference),
            flops(row.flops_forward),
            flops(row.flops_forward + row.flops_backward),
            size(row.activation_bytes),
        )
        for row in result.parts
    ]
    activations = size(result.memory["train"]["activations"])
    inference, forward, step = map(flops, (result.flops_inference, result.flops_forward, result.flops_step))
    rows.append(("total", f"{result.parameters:,}", inference, forward, step, activations))
    header = ("part", "parameters", "FLOPs inference", "FLOPs forward", "FLOPs step", "activations")
    print_table(header, rows, numeric=(1, 2, 3, 4, 5))
    if result.active_parameters < result.parameters:
        print(f"active parameters, those that one token uses: {result.active_parameters:,}")
    print("FLOPs: of a forward at inference, of the forward of a training step, and of the training step.")


def _memory(result: MemberEstimate) -> str:
    lines = []
    for amounts, title in (
        (result.memory["train"], "training"),
        (result.peak, "peak of a process that trains on a CPU, about"),
        (result.memory["inference_fp32"], "inference in float32"),
        (result.memory["inference_bf16"], "inference in bfloat16"),
    ):
        terms = " + ".join(f"{size(amount)} {what}" for what, amount in amounts.items())
        lines.append(f"{title}: {size(sum(amounts.values()))} = {terms}")
    return "\n" + "\n".join(lines) + "\n"
