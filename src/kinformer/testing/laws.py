"""The laws of causal mixers: time and rows, ownership of states, and arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import (
    State,
    detach,
    fork,
    join_rows,
    map_tensors,
    rebuilt,
    reclaimed,
    reserve,
    reserved_parts,
    select_rows,
    tensors,
    value,
)
from kinformer.runtime.errors import KinformerError
from kinformer.testing.subject import (
    BITS,
    GRADIENTS,
    VALUES,
    BrokenLawError,
    MixerSubject,
    Subject,
    agree,
    agree_derivatives,
    agree_gradients,
    agree_states,
    alike,
    dense_gradients,
    draw,
    leaves_of,
    named_leaves,
    require,
)

# A plan of chunks, absorbed in order, or sequence by sequence: each alone, or all as rows of one batch.


class Plan(NamedTuple):
    """A plan: ``inputs`` [batch, time, ...] for chunks of ``sizes``; ``valid`` and ``reset`` [batch, time]."""

    inputs: Tensor
    sizes: Sequence[int]
    valid: Tensor | None = None
    reset: Tensor | None = None


class _Piece(NamedTuple):
    """A sequence in a plan: its row, the positions [n] of its valid tokens, and whether a reset begins it."""

    row: int
    positions: Tensor
    new: bool


def absorb(subject: Subject, module: nn.Module, plan: Plan, state: State) -> tuple[Tensor, State]:
    """Absorb the plan chunk after chunk; return outputs [batch, time, ...] and the final state."""
    outputs, begin = [], 0
    for size in plan.sizes:
        part = slice(begin, begin + size)
        valid, reset = (None if mask is None else mask[:, part] for mask in (plan.valid, plan.reset))
        y, state = subject.run(module, plan.inputs[:, part], state, valid, reset)
        outputs.append(y)
        begin += size
    return torch.cat(outputs, dim=1), state


def absorb_alone(subject: Subject, module: nn.Module, plan: Plan, state: State) -> tuple[Tensor, State]:
    """Absorb every sequence alone, whole and without padding: this defines the plan's results. Zeros elsewhere."""
    outputs, ends = [], []
    for piece in (pieces := list(_pieces(plan))):
        before = None if state is None else select_rows(state, torch.tensor([piece.row]))
        before = subject.anew(module, before) if piece.new else before
        y, end = subject.run(module, plan.inputs[piece.row, piece.positions][None], before)
        outputs.append(y[0])
        ends.append(end)
    return _joined(plan, state, pieces, outputs, ends)


def absorb_together(subject: Subject, module: nn.Module, plan: Plan, state: State) -> tuple[Tensor, State]:
    """Absorb all sequences as rows of two ragged batches: the sequences that continue ``state``, and the new sequences.

    By the laws of rows and of padding the results equal the results of :func:`absorb_alone`, with two calls.
    """
    pieces = list(_pieces(plan))
    outputs, ends = {}, {}
    for new in (False, True):
        chosen = [index for index, piece in enumerate(pieces) if piece.new == new]
        if not chosen:
            continue
        rows = torch.tensor([pieces[index].row for index in chosen])
        before = None if state is None else select_rows(state, rows)
        before = subject.anew(module, before, len(rows)) if new else before
        parts = [plan.inputs[pieces[index].row, pieces[index].positions] for index in chosen]
        inputs = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        sizes = torch.tensor([len(part) for part in parts])
        y, end = subject.run(module, inputs, before, torch.arange(inputs.shape[1]) < sizes[:, None])
        for row, index in enumerate(chosen):
            outputs[index] = y[row, : len(parts[row])]
            ends[index] = select_rows(end, torch.tensor([row]))
    order = range(len(pieces))
    return _joined(plan, state, pieces, [outputs[index] for index in order], [ends[index] for index in order])


def _pieces(plan: Plan) -> Iterator[_Piece]:
    """Yield the sequences of all rows that have a token, in order."""
    everywhere = torch.ones(plan.inputs.shape[1], dtype=torch.bool)
    for row in range(len(plan.inputs)):
        positions = (everywhere if plan.valid is None else plan.valid[row]).nonzero()[:, 0]
        begins = [] if plan.reset is None else plan.reset[row, positions].nonzero()[:, 0].tolist()
        bounds = [0, *begins, len(positions)]
        for index, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if begin < end:
                yield _Piece(row, positions[begin:end], index > 0)


def _joined(
    plan: Plan, state: State, pieces: list[_Piece], outputs: list[Tensor], ends: list[State]
) -> tuple[Tensor, State]:
    """Return the outputs and the final state of the plan, joined from the outputs and states of its sequences."""
    rows, finals = [], []
    for row in range(len(plan.inputs)):
        final = None if state is None else select_rows(state, torch.tensor([row]))
        of_row = [index for index, piece in enumerate(pieces) if piece.row == row]
        for index in of_row:
            adds = pieces[index].new and final is not None
            final = _with_costs(ends[index], final) if adds else ends[index]
        values = torch.cat([outputs[index] for index in of_row])
        positions = torch.cat([pieces[index].positions for index in of_row])
        time = plan.inputs.shape[1]
        rows.append(values.new_zeros(time, *values.shape[1:]).index_copy(0, positions, values))
        finals.append(final)
    return torch.stack(rows), join_rows(finals)


def _with_costs(state: State, before: State) -> State:
    """Return ``state`` with the auxiliary losses of ``before``, a row's earlier sequences: resets keep them."""
    if isinstance(state, Tensor):
        return state
    items = [_with_costs(item, old) for item, old in zip(state, before, strict=True)]
    if "aux" in getattr(state, "_fields", ()):
        items[state._fields.index("aux")] = state.aux + before.aux
    return rebuilt(state, items)


# Outcomes to compare: values, state and gradients of one plan of chunks, and of each of its sequences alone.


class ContractOutputs(NamedTuple):
    outputs: Tensor
    state: State
    gradients: dict[str, Tensor]


How = Callable[[Subject, nn.Module, Plan, State], tuple[Tensor, State]]


def outcome(subject: Subject, module: nn.Module, how: How, plan: Plan, start: State) -> ContractOutputs:
    """Return outputs, final state, and gradients of a fixed projection of both by inputs, weights and initial state."""
    inputs, leaves = leaves_of(module, plan.inputs)
    if start is not None:
        start = map_tensors(lambda leaf: leaf.detach().clone().requires_grad_(_moves(leaf)), start)
        leaves |= {f"initial {name}": leaf for name, leaf, _ in named_leaves(start) if leaf.requires_grad}
    outputs, state = how(subject, module, plan._replace(inputs=inputs), start)
    seen = outputs if plan.valid is None else outputs[plan.valid]
    loss = (seen * _weights(seen)).sum() + project(state)
    gradients = dense_gradients(loss, list(leaves.values()))
    return ContractOutputs(outputs.detach(), detach(state), dict(zip(leaves, gradients, strict=True)))


def _weights(values: Tensor) -> Tensor:
    numbers = torch.arange(values.numel(), dtype=torch.float64, device=values.device)
    return torch.cos(1.3 * numbers + 0.7).view(values.shape)


def project(state: State) -> Tensor:
    """Return a fixed linear function of a state's floating leaves that does not depend on the number of empty slots."""
    total = torch.zeros((), dtype=torch.float64)
    for _, leaf, is_slots in named_leaves(state):
        if _moves(leaf):
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
    """Check that outputs, final state and gradients of each plan equal the results of every sequence alone: for the
    plans ``new`` from a new state, and for the plans ``past`` after a past.

    ``new`` and ``past`` map the name of a plan in messages to the plan. The plans of one start differ only in their
    sizes, so their sequences run once. Where resets cut rows into many sequences, these run together first, and each
    alone only if a plan disagrees.
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
                if together:
                    with suppress(BrokenLawError):
                        agree_outcomes("", got, together)
                        continue
            alone = alone or outcome(subject, module, absorb_alone, plan, start)
            agree_outcomes(where, got, alone)


def _together(subject: Subject, module: nn.Module, plan: Plan, start: State) -> ContractOutputs | None:
    """Return the outcome of all sequences together, or None from a subject that breaks down over them."""
    try:
        return outcome(subject, module, absorb_together, plan, start)
    except Exception:  # any error: the sequences alone decide
        return None


def starts(subject: Subject, module: nn.Module) -> Iterator[tuple[str, State]]:
    """Yield a new state, and a state after a past, each with a name for messages."""
    yield "from a new state", subject.start(module, subject.batch)
    yield "after a past of 9 tokens", subject.started(module, subject.batch)


def partitions(time: int) -> Iterator[list[int]]:
    """Yield lists of chunk sizes that sum to ``time``: ones, odd sizes, long and short, short and long, random."""
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


# The laws of time and of rows: partition, causality, padding, resets, independence of rows.


def causality(subject: Subject) -> None:
    """Change the tokens from t on strongly: no output before t may change. Gradients would miss leaks by selection."""
    module = subject.build()
    inputs = subject.inputs(subject.batch, subject.time, seed=1)
    since = sorted({1, 2, 5, subject.time // 2, subject.time - 4, subject.time - 1})
    changed = [(at, subject.disturb(inputs, at, factor)) for at in since for factor in (6.0, -6.0)]
    for kind, start in starts(subject, module):
        with torch.no_grad():
            want, _ = subject.run(module, inputs, start)
            if _all_causal(subject, module, start, changed, want):
                continue
            for at, others in changed:
                got, _ = subject.run(module, others, start)
                place = f"outputs before token {at} when tokens from {at} on change, {kind}"
                agree(place, got[:, :at], want[:, :at], BITS)


def _all_causal(
    subject: Subject, module: nn.Module, start: State, changed: list[tuple[int, Tensor]], want: Tensor
) -> bool:
    """Return whether no change, as rows of one batch, moves an earlier output. If False, check each alone."""
    rows = torch.arange(subject.batch).repeat(len(changed))
    before = None if start is None else select_rows(start, rows)
    try:
        got, _ = subject.run(module, torch.cat([others for _, others in changed]), before)
        for (at, _), part in zip(changed, got.split(subject.batch), strict=True):
            agree("", part[:, :at], want[:, :at], BITS)
    except Exception:  # any error: each change alone decides
        return False
    return True


def partition(subject: Subject) -> None:
    """Check that outputs, gradients and final state of any cut into chunks equal the results of one chunk."""
    module = subject.build()
    inputs = subject.inputs(subject.batch, subject.time, seed=2)
    cuts = list(partitions(subject.time))
    # A past is itself a first chunk, so half of the cuts run from a new state and half after a past.
    for (kind, start), shared in zip(starts(subject, module), (cuts[::2], cuts[1::2]), strict=True):
        want = outcome(subject, module, absorb, Plan(inputs, [subject.time]), start)
        for sizes in shared:
            got = outcome(subject, module, absorb, Plan(inputs, sizes), start)
            agree_outcomes(f"chunks of {_brief(sizes)} against one chunk, {kind}", got, want)


def padding(subject: Subject) -> None:
    """Check that ragged chunks with NaN in their padding are as each row alone, also for rows without tokens."""
    sizes = _ragged_sizes(subject.time)
    valid = _ragged_mask(subject, sizes)
    inputs = subject.spoil(subject.inputs(subject.batch, sum(sizes), seed=3), valid)
    plans = {f"ragged chunks of {_brief(sizes)} against rows alone": Plan(inputs, sizes, valid)}
    agree_with_rows_alone(subject, plans, plans)


def reset(subject: Subject) -> None:
    """Check that after a reset, anywhere in a chunk, everything is as in a new sequence; partitions agree on it."""
    inputs = subject.inputs(subject.batch, subject.time, seed=4)
    inputs = torch.cat([subject.disturb(inputs, 0, 6.0)[:, :8], inputs[:, 8:]], dim=1)
    mixed, singly, whole = [4, 5, subject.time - 9], [4, 1, 1, subject.time - 6], [subject.time]
    # Different positions per row, with a row without resets; then every row at its first token and later.
    unlike = torch.zeros(subject.batch, subject.time, dtype=torch.bool)
    for row in range(1, subject.batch):
        unlike[row, [3 * row, 3 * row + 1, 3 * row + 2, subject.time - 2 * row]] = True
    alike = torch.zeros_like(unlike)
    alike[:, [0, 13]] = True
    for reset, new, past in ((unlike, (singly,), (mixed, whole)), (alike, (mixed,), (whole,))):
        plans = [
            {
                f"resets, chunks of {_brief(sizes)}, against sequences alone": Plan(inputs, sizes, reset=reset)
                for sizes in cuts
            }
            for cuts in (new, past)
        ]
        agree_with_rows_alone(subject, *plans)


def ragged_reset(subject: Subject) -> None:
    """Check resets in ragged chunks after a past; a reset that stands on padding is none."""
    sizes = _ragged_sizes(subject.time)
    valid = _ragged_mask(subject, sizes)
    inputs = subject.spoil(subject.inputs(subject.batch, sum(sizes), seed=5), valid)
    chance = draw(lambda generator: torch.rand(valid.shape, generator=generator), 1)
    place = f"resets in ragged chunks of {_brief(sizes)} against sequences alone"
    agree_with_rows_alone(subject, {}, {place: Plan(inputs, sizes, valid, chance < 0.2)})


def rows(subject: Subject) -> None:
    """Check that rows permuted, selected, repeated, or among other rows give the same results."""
    module = subject.build()
    inputs = subject.inputs(subject.batch, subject.time, seed=6)
    batch = range(subject.batch)
    with torch.no_grad():
        for kind, start in starts(subject, module):
            y, end = subject.run(module, inputs, start)
            for chosen in ([*batch][::-1], [*batch][1:], [*batch][:1], [0, *batch]):
                index = torch.tensor(chosen)
                row_state = None if start is None else select_rows(start, index)
                got, state = subject.run(module, inputs[index], row_state)
                agree(f"outputs of rows {chosen} alone, {kind}", got, y[index], VALUES)
                agree_states(f"state of rows {chosen} alone, {kind}", state, select_rows(end, index))
            others = torch.cat([subject.disturb(inputs, 0, 6.0)[:1], inputs[1:]])
            got, state = subject.run(module, others, start)
            agree(f"outputs of rows that stayed when row 0 changed, {kind}", got[1:], y[1:], BITS)
            stayed = torch.arange(1, subject.batch)
            agree_states(
                f"state of rows that stayed when row 0 changed, {kind}",
                select_rows(state, stayed),
                select_rows(end, stayed),
                BITS,
            )


def _brief(sizes: list[int]) -> str:
    return f"1 x {len(sizes)}" if set(sizes) == {1} else "+".join(map(str, sizes))


def _ragged_sizes(time: int) -> list[int]:
    return [7, 1, 3, time - 8, 4, 1]


def _ragged_mask(subject: Subject, sizes: list[int]) -> Tensor:
    """Return masks with r fewer tokens of row r in one chunk and r more in the next, none in some chunks."""
    row = torch.arange(subject.batch)
    masks = []
    for index, size in enumerate(sizes):
        counts = (size - 2 * row).clamp_min(0) if index % 2 == 0 else (1 + 3 * row).clamp_max(size)
        masks.append(subject.mask(counts * (index != 2), size, seed=index))
    return torch.cat(masks, dim=1)


# The laws of ownership: a value state is never written to, and a reserved state has a single owner.

STEPS = (1, 1, 3, 1, 5, 2)


def purity(subject: Subject) -> None:
    """Check that the same state twice gives the same result; state, inputs and the module's tensors stay."""
    for grad in (True, False):
        module = subject.build()
        for kind, start in starts(subject, module):
            with torch.set_grad_enabled(grad):
                _twice(subject, module, start, f"{kind}, {'with' if grad else 'without'} gradients")


def _twice(subject: Subject, module: nn.Module, start: State, place: str) -> None:
    inputs, others = (subject.inputs(subject.batch, subject.time, seed) for seed in (21, 22))
    watched = {"inputs": inputs}
    watched |= {f"leaf {i} of the state": leaf for i, leaf in enumerate(() if start is None else tensors(start))}
    watched |= {f"{name} of the module": tensor for name, tensor in module.state_dict().items()}
    before = {name: tensor.detach().clone() for name, tensor in watched.items()}

    y, end = subject.call(module, inputs, start)
    y_before, end_before = y.detach().clone(), detach(fork(end))
    subject.call(module, others, end)
    again, end_again = subject.call(module, inputs, start)

    agree(f"outputs when the same state is used twice, {place}", again, y_before, BITS)
    agree_states(f"state when the same state is used twice, {place}", end_again, end_before, BITS)
    agree(f"outputs once a later chunk was absorbed, {place}", y, y_before, 0.0)
    agree_states(f"state once a later chunk was absorbed, {place}", end, end_before, 0.0)
    for name, tensor in watched.items():
        require(torch.equal(tensor.detach(), before[name]), f"{name} was written to, {place}.")


def reserved(subject: Subject) -> None:
    """Check that a reserved state acts as the value state: same results, one owner, forks, ragged rows and resets. A
    reclaimed earlier state continues as if the later chunks had never been absorbed."""
    module = subject.build()
    total = subject.time
    with torch.no_grad():
        for kind, start in starts(subject, module):
            if start is None:
                continue
            _ownership(subject, module, start, kind)
            _reclaims(subject, module, start, kind)
        _walk(subject, module, start, total, kind)  # after a past, whose slots a buffer begins with
        _forks(subject, module, start, kind)


def _walk(subject: Subject, module: nn.Module, start: object, total: int, kind: str) -> None:
    for masks in ("without masks", "with ragged rows and resets"):
        owned, state = reserve(fork(start), total), start
        for step, (inputs, valid, reset) in enumerate(_steps(subject, total, masks != "without masks")):
            got, owned = subject.call(module, inputs, owned, valid, reset)
            want, state = subject.run(module, inputs, state, valid, reset)
            place = f"step {step} of a reserved state against the value state, {masks}, {kind}"
            agree(f"{place}, outputs", got, want, VALUES)
            agree_states(f"{place}, state", owned, state)


def _steps(subject: Subject, total: int, masked: bool) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Yield chunks of different sizes that hold at most ``total`` tokens together."""
    step = 0
    while total > 0:
        size = min(total, STEPS[step % len(STEPS)])
        inputs = subject.inputs(subject.batch, size, seed=30 + step)
        shape = (subject.batch, size)
        counts = draw(lambda generator: torch.randint(shape[1] + 1, shape[:1], generator=generator), step)  # noqa: B023
        reset = draw(lambda generator: torch.rand(shape, generator=generator), 100 + step) < 0.15  # noqa: B023
        yield (inputs, subject.mask(counts, size, step), reset) if masked else (inputs, None, None)
        total, step = total - size, step + 1


def _ownership(subject: Subject, module: nn.Module, start: object, kind: str) -> None:
    """Check that a used state raises an error, and that later steps do not write into a value taken before."""
    owned = reserve(fork(start), subject.time)
    if not any(reserved_parts(owned)):
        return
    inputs = subject.inputs(subject.batch, 3, seed=41)
    taken = value(owned)
    agree_states(f"value of a fresh reservation, {kind}", taken, start, 0.0)
    _, successor = subject.call(module, inputs, owned)
    agree_states(f"value taken before a step of the reservation, {kind}", taken, start, 0.0)
    require(any(reserved_parts(successor)), f"a step of a reserved state gave back a value state, {kind}.")
    for use, act in {
        "stepped again": lambda: subject.call(module, inputs, owned),
        "forked": lambda: fork(owned),
        "read": lambda: value(owned),
    }.items():
        try:
            act()
        except KinformerError:
            continue
        require(False, f"a reserved state that was already used could be {use}, {kind}; expected a KinformerError.")


def _forks(subject: Subject, module: nn.Module, start: object, kind: str) -> None:
    """Check that a fork, selected rows and the original continue independently, in turns."""
    tokens = [subject.inputs(subject.batch, 2, seed) for seed in (51, 52, 53)]
    _, owned = subject.call(module, tokens[0], reserve(fork(start), subject.time))
    _, state = subject.run(module, tokens[0], start)
    order = torch.arange(subject.batch).flip(0)
    branches = {
        "the original": (owned, state),
        "a fork": (fork(owned), state),
        "its rows in another order": (select_rows(owned, order), select_rows(state, order)),
    }
    for _ in range(2):
        for index, (name, (mine, plain)) in enumerate(branches.items()):
            got, mine = subject.call(module, tokens[index], mine)
            want, plain = subject.run(module, tokens[index], plain)
            agree(f"outputs of {name} beside other branches of a reserved state, {kind}", got, want, VALUES)
            agree_states(f"state of {name} beside other branches of a reserved state, {kind}", mine, plain)
            branches[name] = (mine, plain)


def _reclaims(subject: Subject, module: nn.Module, start: object, kind: str) -> None:
    """Check that an earlier state continues as if later chunks had never been absorbed, in whichever buffers."""
    for before, after in ((0, 1), (2, 3), (1, subject.time)):
        owned = reserve(fork(start), before + after + 3)
        state = start
        if before:
            _, owned = subject.call(module, subject.inputs(subject.batch, before, seed=61), owned)
            _, state = subject.run(module, subject.inputs(subject.batch, before, seed=61), start)
        dropped = owned
        for seed, size in ((62, after), (63, 1)):
            _, dropped = subject.call(module, subject.inputs(subject.batch, size, seed), dropped)
        earlier = reclaimed(owned)
        others, valid, reset = next(_steps(subject, 2, masked=True))
        got, now = subject.call(module, others, earlier, valid, reset)
        want, state = subject.run(module, others, state, valid, reset)
        place = f"after {before} tokens when {after + 1} further ones are taken back, {kind}"
        agree(f"outputs {place}", got, want, VALUES)
        agree_states(f"state {place}", now, state)
        if before and any(reserved_parts(dropped)):  # without an earlier step, both states have separate buffers
            try:
                value(dropped)
            except KinformerError:
                continue
            require(False, f"a reserved state could be read once an earlier one was reclaimed, {kind}.")


# The laws of arithmetic: dtypes, autocast, other implementations, numerical gradients, compilation.

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Allowed error of all outputs together, relative to their norm: rounding of a few operations in each dtype."""

CLOSE_AT_LARGE = {torch.float16: 0.05, torch.bfloat16: 0.3}
"""Allowed error of outputs of large tokens, relative to their norm."""
LARGE = 30.0
"""The factor that makes tokens large: their squares and sums exceed the range of float16, the tokens do not."""


def dtype(subject: MixerSubject) -> None:
    """Check that outputs in other dtypes have this dtype and are near the float64 outputs, and that autocast runs."""
    inputs = subject.inputs(subject.batch, subject.time, seed=71)
    with torch.no_grad():
        want = _in_two_chunks(subject, subject.build(), inputs)
        for kind in CLOSE:
            got = _in_two_chunks(subject, subject.build(kind), inputs.to(kind))
            require(got.dtype == kind, f"outputs are {got.dtype} for inputs and weights of {kind}.")
            agree_in_norm(f"outputs in {kind} against float64", got, want, CLOSE[kind])
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            got = _in_two_chunks(subject, subject.build(torch.float32), inputs.float())
        agree_in_norm("outputs under autocast against float64", got, want, CLOSE[torch.bfloat16])


def half_precision(subject: MixerSubject) -> None:
    """Check that large tokens, zeros and padding give finite outputs in half precision, near the float32 outputs."""
    inputs = LARGE * subject.inputs(subject.batch, subject.time, seed=76)
    inputs[:, 3] = 0
    valid = subject.mask(torch.arange(subject.time, subject.time - subject.batch, -1), subject.time, seed=77)
    with torch.no_grad():
        for kind, tolerance in CLOSE_AT_LARGE.items():
            module, rounded = subject.build(kind), inputs.to(kind)
            start = module.initial_state(len(inputs), dtype=kind)
            got, _ = subject.run(module, rounded, start, valid)
            wide = module.float()
            start = wide.initial_state(len(inputs), dtype=torch.float32)
            want, _ = subject.run(wide, rounded.float(), start, valid)
            agree_at_large("", kind, got, want, tolerance)


def agree_at_large(case: str, kind: torch.dtype, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Check that outputs ``got`` in half precision are finite and near ``want``."""
    require(bool(got.isfinite().all()), f"large, zero or padded tokens give non-finite outputs in {kind}{case}.")
    agree_in_norm(f"outputs of large tokens in {kind} against float32{case}", got, want.double(), tolerance)


def agree_in_norm(place: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Check that the error of ``got`` is at most ``tolerance`` of the norm of ``want``."""
    error = float((got.double() - want).norm() / want.norm())
    require(error <= tolerance, f"{place}: off by {error:.3g} of their norm; at most {tolerance:g} is allowed.")


def _in_two_chunks(subject: MixerSubject, module: CausalMixer, inputs: Tensor) -> Tensor:
    autocast = torch.is_autocast_enabled(torch.get_default_device().type)
    where = "under autocast" if autocast else f"in {inputs.dtype}"
    start = state = module.initial_state(len(inputs), dtype=None if autocast else inputs.dtype)
    outputs = []
    for part in inputs.split(subject.time // 2, dim=1):
        y, state = subject.run(module, part, state)
        outputs.append(y)
        alike(state, start, where)
        for name, leaf, is_slots in named_leaves(state):
            wide = leaf.element_size() >= 4 or is_slots or not (autocast and leaf.is_floating_point())
            require(wide, f"the accumulator {name} is {leaf.dtype} under autocast, not float32.")
    return torch.cat(outputs, dim=1)


def implementations(subject: MixerSubject) -> None:
    """Check that every other implementation with the same weights gives the same outputs, state and gradients."""
    oracle = subject.build(make=subject.impls.get("reference"))
    inputs = subject.inputs(subject.batch, subject.time, seed=72)
    sizes = [subject.time // 2, 1, subject.time - subject.time // 2 - 1]
    others = {name: make for name, make in subject.impls.items() if name != "reference"}
    for kind, start in starts(subject, oracle):
        want = outcome(subject, oracle, absorb, Plan(inputs, sizes), start)
        for name, make in {"the default": subject.make, **others}.items():
            module = subject.build(make=make)
            module.load_state_dict(oracle.state_dict())
            got = outcome(subject, module, absorb, Plan(inputs, sizes), start)
            agree_outcomes(f"implementation {name!r}, {kind}", got, want)


def gradcheck(subject: MixerSubject) -> None:
    """Check that analytic gradients by inputs, initial state and weights equal numerical ones (3 tokens after 2)."""
    module = subject.build()
    agree_gradients(*_as_function(subject, module), module, "inputs, initial state", "")


def derivatives(subject: MixerSubject) -> None:
    """Check that second and forward-mode derivatives equal numerical derivatives, or raise (3 tokens after 2)."""
    for name, make in {"the default": subject.make, **subject.impls}.items():
        agree_derivatives(f"implementation {name!r}", *_as_function(subject, subject.build(make=make)))


def _as_function(subject: MixerSubject, module: CausalMixer) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """Return outputs and final state as a function of inputs, initial state and weights, and these as leaves."""
    start = subject.started(module, batch=1, time=2)
    names = [name for name, _ in module.named_parameters()]
    leaves = [subject.inputs(1, 3, seed=73), *filter(_moves, tensors(start)), *module.parameters()]

    def function(inputs: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        replacements = iter(rest)
        state = map_tensors(lambda leaf: next(replacements) if _moves(leaf) else leaf, start)
        weights = dict(zip(names, replacements, strict=True))
        y, end = torch.func.functional_call(module, weights, (Chunk(inputs), state))
        return y, *filter(_moves, tensors(end))

    return function, [leaf.detach().clone().requires_grad_() for leaf in leaves]


def _moves(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() > 0


def compile_(subject: MixerSubject) -> None:
    """Check that ``torch.compile(fullgraph=True)`` captures the forward pass, with the eager results."""
    torch.compiler.reset()
    module = subject.build()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    plan = Plan(subject.inputs(subject.batch, 7, seed=74), [7])
    start = subject.started(module, subject.batch)
    want = outcome(subject, module, absorb, plan, start)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        got = outcome(subject, module, lambda who, _, what, state: absorb(who, compiled, what, state), plan, start)
    agree_outcomes("compiled against eager", got, want)
