"""Runs to compare: one plan of chunks absorbed in order, or each of its sequences alone; values, state, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.state import State
from kinformer.testing.derivatives import dense_gradients
from kinformer.testing.errors import GRADIENTS, VALUES, agree, agree_states, require
from kinformer.testing.subject import Subject, named_leaves


class Plan(NamedTuple):
    """The plan: ``inputs`` [batch, time, ...] to be absorbed in chunks of ``sizes``;
    ``valid`` and ``reset`` [batch, time]."""

    inputs: Tensor
    sizes: Sequence[int]
    valid: Tensor | None = None
    reset: Tensor | None = None


class ContractOutputs(NamedTuple):
    outputs: Tensor
    state: State
    gradients: dict[str, Tensor]


How = Callable[[Subject, Any, Plan, Any], tuple[Tensor, Any]]


def absorb(subject: Subject, module: Any, plan: Plan, state: State) -> tuple[Tensor, State]:
    """Absorb the plan as it stands, chunk after chunk; return outputs [batch, time, ...] and the final state."""
    outputs, begin = [], 0
    for size in plan.sizes:
        part = slice(begin, begin + size)
        valid, reset = (None if mask is None else mask[:, part] for mask in (plan.valid, plan.reset))
        y, state = subject.run(module, plan.inputs[:, part], state, valid, reset)
        outputs.append(y)
        begin += size
    return torch.cat(outputs, dim=1), state


def absorb_alone(subject: Subject, module: Any, plan: Plan, state: State) -> tuple[Tensor, State]:
    """Absorb every sequence of every row alone, whole, without padding, which defines the
    plan's results; zeros at invalid positions."""
    rows, ends = [], []
    for row in range(len(plan.inputs)):
        row_state = None if state is None else states.select_rows(state, torch.tensor([row]))
        blocks, positions = [], []
        for sequence, new in _sequences(plan, row):
            before, row_state = row_state, subject.anew(module, row_state) if new else row_state
            y, row_state = subject.run(module, plan.inputs[row, sequence][None], row_state)
            row_state = _with_costs(row_state, before) if new and before is not None else row_state
            blocks.append(y[0])
            positions.append(sequence)
        rows.append(_scatter(blocks, positions, plan.inputs.shape[1]))
        ends.append(row_state)
    return torch.stack(rows), states.join_rows(ends)


def _with_costs(state: State, before: State) -> Any:
    """Return ``state`` with the side costs of ``before``, its row's last
    sequence added: a reset clears none of them."""
    if isinstance(state, Tensor):
        return state
    items = [_with_costs(item, old) for item, old in zip(state, before, strict=True)]
    if "aux" in getattr(state, "_fields", ()):
        items[state._fields.index("aux")] = state.aux + before.aux
    return states.rebuilt(state, items)


def _sequences(plan: Plan, row: int) -> Iterator[tuple[Tensor, bool]]:
    """Yield positions [n] of the valid tokens of each sequence of a row, and whether the sequence is new."""
    everywhere = torch.ones(plan.inputs.shape[1], dtype=torch.bool)
    positions = (everywhere if plan.valid is None else plan.valid[row]).nonzero()[:, 0]
    begins = [] if plan.reset is None else plan.reset[row, positions].nonzero()[:, 0].tolist()
    bounds = [0, *begins, len(positions)]
    for index, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if begin < end:
            yield positions[begin:end], index > 0


def _scatter(blocks: list[Tensor], positions: list[Tensor], time: int) -> Tensor:
    values = torch.cat(blocks)
    return values.new_zeros(time, *values.shape[1:]).index_copy(0, torch.cat(positions), values)


def outcome(subject: Subject, module: Any, how: How, plan: Plan, start: Any) -> ContractOutputs:
    """Return outputs, final state, and the gradients of a random projection of both
    by inputs, weights and initial state."""
    leaves = {
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
    return torch.cos(1.3 * torch.arange(values.numel(), dtype=torch.float64) + 0.7).view(values.shape)


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

    The plans of one start, each with what messages call it, differ in their sizes only, so that sequences alone are run
    once.
    """
    module = subject.build()
    for (kind, start), plans in zip(starts(subject, module), (new, past), strict=True):
        want = None
        for place, plan in plans.items():
            where = f"{place}, {kind}"
            got = outcome(subject, module, absorb, plan, start)
            if plan.valid is not None:
                padding = got.outputs[~plan.valid]
                if subject.zero_at_padding:
                    require(bool((padding == 0).all()), f"{where}: outputs at invalid positions are not zero.")
                require(bool(padding.isfinite().all()), f"{where}: outputs at invalid positions are not finite.")
                got = got._replace(outputs=got.outputs.masked_fill(~plan.valid[..., None], 0))
            want = want or outcome(subject, module, absorb_alone, plan, start)
            agree_outcomes(where, got, want)


def starts(subject: Subject, module: Any) -> Iterator[tuple[str, Any]]:
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
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        yield _cut(time, torch.randint(1, 9, (time,), generator=generator).tolist())


def _cut(time: int, sizes: list[int]) -> list[int]:
    cut: list[int] = []
    while (left := time - sum(cut)) > 0:
        cut.append(min(left, sizes[len(cut) % len(sizes)]))
    return cut
