"""Outcomes to compare: values, state and gradients of one plan of chunks, and of its sequences without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.state import State
from kinformer.testing.derivatives import dense_gradients
from kinformer.testing.errors import GRADIENTS, VALUES, BrokenLawError, agree, agree_states, require
from kinformer.testing.sequences import Plan, absorb, absorb_alone, absorb_together
from kinformer.testing.subject import Subject, draw, named_leaves


class ContractOutputs(NamedTuple):
    outputs: Tensor
    state: State
    gradients: dict[str, Tensor]


How = Callable[[Subject, nn.Module, Plan, State], tuple[Tensor, State]]


def outcome(subject: Subject, module: nn.Module, how: How, plan: Plan, start: State) -> ContractOutputs:
    """Return outputs, final state, and the gradients of a random projection of both
    by inputs, weights and initial state."""
    leaves: dict[str, Tensor] = {
        f"parameter {name}": parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    inputs = plan.inputs.clone()
    if inputs.is_floating_point():
        leaves["inputs"] = inputs.requires_grad_()
    if start is not None:
        start = states.map_tensors(_as_leaf, start)
        leaves |= {f"initial {name}": leaf for name, leaf, _ in named_leaves(start) if leaf.requires_grad}
    outputs, state = how(subject, module, plan._replace(inputs=inputs), start)
    seen = outputs if plan.valid is None else outputs[plan.valid]
    loss = (seen * _weights(seen)).sum() + project(state)
    gradients = dense_gradients(loss, list(leaves.values()))
    return ContractOutputs(outputs.detach(), states.detach(state), dict(zip(leaves, gradients, strict=True)))


def _as_leaf(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point() and leaf.numel() > 0)


def _weights(values: Tensor) -> Tensor:
    return torch.cos(1.3 * torch.arange(values.numel(), dtype=torch.float64, device=values.device) + 0.7).view(
        values.shape
    )


def project(state: State) -> Tensor:
    """Return a fixed linear function of a state's floating leaves that does not
    depend on how many empty slots it has."""
    total = torch.zeros((), dtype=torch.float64)
    for _, leaf, is_slots in named_leaves(state):
        if leaf.is_floating_point() and leaf.numel():
            newest_first = leaf.flip(2).movedim(2, 1) if is_slots else leaf
            flat = newest_first.reshape(len(leaf), -1)
            total = total + (flat * _weights(flat[0])).sum()
    return total


def agree_outcomes(place: str, got: ContractOutputs, want: ContractOutputs) -> None:
    """Check that values and states agree to 1e-9, gradients to 1e-7."""
    agree(f"{place}, outputs", got.outputs, want.outputs, VALUES)
    agree_states(f"{place}, final state", got.state, want.state)
    for name, gradient in want.gradients.items():
        agree(f"{place}, gradient of {name}", got.gradients[name], gradient, GRADIENTS)


def agree_with_rows_alone(subject: Subject, new: Mapping[str, Plan], past: Mapping[str, Plan]) -> None:
    """Check that outputs, final state and gradients of all plans are those of every sequence alone: of those ``new``
    from a new state, of those ``past`` after a past.

    The plans of one start, each with what messages call it, differ in their sizes only, so that their sequences are run
    once. Where resets cut rows into many sequences these are run together, and alone only if something disagrees.
    """
    module = subject.build()
    for (kind, start), plans in zip(starts(subject, module), (new, past), strict=True):
        alone = together = None
        for place, plan in plans.items():
            where = f"{place}, {kind}"
            got = outcome(subject, module, absorb, plan, start)
            if plan.valid is not None:
                padding = got.outputs[~plan.valid]
                if subject.zero_at_padding:
                    require(bool((padding == 0).all()), f"{where}: outputs at invalid positions are not zero.")
                require(bool(padding.isfinite().all()), f"{where}: outputs at invalid positions are not finite.")
                got = got._replace(outputs=got.outputs.masked_fill(~plan.valid[..., None], 0))
            if plan.reset is not None:
                together = together or _together(subject, module, plan, start)
                if together and _agreed(got, together):
                    continue
            alone = alone or outcome(subject, module, absorb_alone, plan, start)
            agree_outcomes(where, got, alone)


def _together(subject: Subject, module: nn.Module, plan: Plan, start: State) -> ContractOutputs | None:
    """Return the outcome of all sequences together, or None from a subject that breaks down over them."""
    try:
        return outcome(subject, module, absorb_together, plan, start)
    except Exception:  # whatever it is, it is judged by its sequences alone
        return None


def _agreed(got: ContractOutputs, want: ContractOutputs) -> bool:
    try:
        agree_outcomes("", got, want)
    except BrokenLawError:
        return False
    return True


def starts(subject: Subject, module: nn.Module) -> Iterator[tuple[str, State]]:
    """Yield a new state and one that has a past, with a name for messages."""
    yield "from a new state", subject.start(module, subject.batch)
    yield "after a past of 9 tokens", subject.started(module, subject.batch)


def partitions(time: int) -> Iterator[list[int]]:
    """Yield ways of cutting ``time`` tokens: ones, odd sizes, one long and one
    short, one short and one long, random."""
    yield [1] * time
    yield _cut(time, [3, 5, 7])
    yield [time - 2, 2]
    yield [1, time - 1]
    for seed in (3, 4):
        yield _cut(time, draw(lambda generator: torch.randint(1, 9, (time,), generator=generator), seed).tolist())


def _cut(time: int, sizes: list[int]) -> list[int]:
    cut: list[int] = []
    while (left := time - sum(cut)) > 0:
        cut.append(min(left, sizes[len(cut) % len(sizes)]))
    return cut
