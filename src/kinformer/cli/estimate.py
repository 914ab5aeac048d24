"""``kinformer estimate MEMBER``: what a model costs, before anything is run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from kinformer.cli.options import Changes, CommonOptions, Member
from kinformer.cli.output import print_json, print_table
from kinformer.cli.parsing import overrides
from kinformer.training.metric import flops, size

if TYPE_CHECKING:
    from kinformer.estimation.estimate import Estimate
    from kinformer.estimation.rules import RulesOfThumb

LENGTH = 1024
RULE_BYTES = {"adamw": 8, "muon": 4, "adafactor": 0, "adagrad": 4, "sgd": 4}


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Parameters, FLOPs, training and inference memory of a member, by part and in all, before anything is run."""

    member: Member
    """A member of the family (see: kinformer list)."""
    recipe: str = "small"
    """Which of the member's recipes (see: kinformer show MEMBER)."""
    vocab_size: int | None = None
    """Size of the vocabulary; the recipe's own if not given."""
    set: Changes = ()
    """A change to the recipe, as in --set layers=6 or --set layers.*.mixer.num_heads=8; may be given again."""
    length: int | None = None
    """Tokens of a row (1024, or what an image of the recipe's size has)."""
    batch: int = 1
    """Rows."""
    optimizer: Literal["adamw", "muon", "adafactor", "adagrad", "sgd"] = "adamw"
    """Whose state is counted; sgd has momentum."""
    precision: Literal["fp32", "bf16-mixed"] = "fp32"
    """Precision of the activations in training, and of the weights in inference."""


def run(options: Options) -> int:
    """Print the estimate; returns the exit status."""
    from kinformer.estimation.estimate import estimate
    from kinformer.estimation.peak import interpreter_bytes, peak
    from kinformer.estimation.rules import rules_of_thumb
    from kinformer.family.build import configure
    from kinformer.family.table import member
    from kinformer.runs.objective_cost import objective_cost

    config = configure(options.member, options.recipe, options.vocab_size, overrides(options.set))
    if options.length is None:
        options = replace(options, length=config.input.length or LENGTH)
    assert options.length is not None
    result = estimate(
        config,
        length=options.length,
        batch=options.batch,
        optimizer=options.optimizer,
        precision=options.precision,
    )
    sizes = {"length": options.length, "batch": options.batch}
    own = objective_cost(config, member(options.member).objective, **sizes, optimizer=options.optimizer)
    process = peak(config, result, **sizes, objective=own, interpreter=interpreter_bytes())
    rules = rules_of_thumb(
        config,
        length=options.length,
        batch=options.batch,
        optimizer_bytes=RULE_BYTES[options.optimizer],
        precision=options.precision,
    )
    if options.json:
        extra = {"peak_bytes": sum(process.values()), "peak": process}
        extra |= {"rules_of_thumb": asdict(rules) if rules else None}
        print_json(asdict(result) | extra)
    else:
        _show(options, result, process, rules)
    return 0


def _show(options: Options, result: Estimate, process: dict[str, int], rules: RulesOfThumb | None) -> None:
    rows = f"{options.batch} row{'s' if options.batch > 1 else ''} of {options.length} tokens"
    print(f"{options.member} ({options.recipe}), {rows}, {options.precision}, {options.optimizer}\n")
    _print_parts(result)
    print(_memory(result, process))
    if rules:
        print(
            f"rules of thumb: {rules.parameters:,} parameters (V E + 12 L E^2), {flops(rules.flops_step)} a step "
            f"(6 a parameter and token),\n{size(rules.activation_bytes)} activations (B T L (14 E + T N) numbers; "
            f"T N are scores, which tiled attention never stores), {size(rules.train_bytes)} in training"
        )


def _print_parts(result: Estimate) -> None:
    rows = [
        (
            row.part,
            f"{row.parameters:,}",
            flops(row.flops_forward),
            flops(row.flops_forward + row.flops_backward),
            size(row.activation_bytes),
        )
        for row in result.parts
    ]
    activations = size(result.memory["train"]["activations"])
    rows.append(("total", f"{result.parameters:,}", flops(result.flops_forward), flops(result.flops_step), activations))
    print_table(("part", "parameters", "FLOPs forward", "FLOPs step", "activations"), rows, numeric=(1, 2, 3, 4))


def _memory(result: Estimate, process: dict[str, int]) -> str:
    lines = []
    for amounts, title in (
        (result.memory["train"], "training"),
        (process, "peak of a process that trains on a CPU, about"),
        (result.memory["inference_fp32"], "inference in float32"),
        (result.memory["inference_bf16"], "inference in bfloat16"),
    ):
        terms = " + ".join(f"{size(amount)} {what}" for what, amount in amounts.items())
        lines.append(f"{title}: {size(sum(amounts.values()))} = {terms}")
    return "\n" + "\n".join(lines) + "\n"
