"""The laws of time and of rows: partition, causality, padding, resets, independence of rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.state import State
from kinformer.testing.errors import BITS, VALUES, agree, agree_states
from kinformer.testing.scenario import agree_outcomes, agree_with_rows_alone, outcome, partitions, starts
from kinformer.testing.sequences import Plan, absorb
from kinformer.testing.subject import Subject


def causality(subject: Subject) -> None:
    """Change tokens from t on strongly and check that no output before t moves.
    Gradients would miss leaks by selection."""
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
    """Return whether all changes as rows of one batch leave what stands before them; if not, one may by itself."""
    rows = torch.arange(subject.batch).repeat(len(changed))
    before = None if start is None else states.select_rows(start, rows)
    try:
        got, _ = subject.run(module, torch.cat([others for _, others in changed]), before)
        for (at, _), part in zip(changed, got.split(subject.batch), strict=True):
            agree("", part[:, :at], want[:, :at], BITS)
    except Exception:  # whatever it is, it is judged by each change alone
        return False
    return True


def partition(subject: Subject) -> None:
    """Check that for any cut into chunks, outputs, gradients and final state are those of one chunk."""
    module = subject.build()
    inputs = subject.inputs(subject.batch, subject.time, seed=2)
    cuts = list(partitions(subject.time))
    # A past is itself a first chunk, so that a new state and one with a past share the cuts between them.
    for (kind, start), shared in zip(starts(subject, module), (cuts[::2], cuts[1::2]), strict=True):
        want = outcome(subject, module, absorb, Plan(inputs, [subject.time]), start)
        for sizes in shared:
            got = outcome(subject, module, absorb, Plan(inputs, sizes), start)
            agree_outcomes(f"chunks of {_brief(sizes)} against one chunk, {kind}", got, want)


def padding(subject: Subject) -> None:
    """Check that ragged chunks with NaN in their padding are as each row alone; the state of a row without tokens does
    not change."""
    sizes = _ragged_sizes(subject.time)
    valid = _ragged_mask(subject, sizes)
    inputs = subject.spoil(subject.inputs(subject.batch, sum(sizes), seed=3), valid)
    plans = {f"ragged chunks of {_brief(sizes)} against rows alone": Plan(inputs, sizes, valid)}
    agree_with_rows_alone(subject, plans, plans)


def reset(subject: Subject) -> None:
    """Check that after a reset, at any position of a chunk, everything is as in a
    new sequence; partitions agree on it."""
    inputs = subject.inputs(subject.batch, subject.time, seed=4)
    inputs = torch.cat([subject.disturb(inputs, 0, 6.0)[:, :8], inputs[:, 8:]], dim=1)
    mixed, whole, ones = [4, 5, subject.time - 9], [subject.time], [1] * subject.time
    unlike, alike = _reset_positions(subject)
    for reset, new, past in ((unlike, (mixed, ones), (mixed, whole)), (alike, (mixed,), (whole,))):
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
    chance = torch.rand(valid.shape, generator=torch.Generator().manual_seed(1))
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
                row_state = None if start is None else states.select_rows(start, index)
                got, state = subject.run(module, inputs[index], row_state)
                agree(f"outputs of rows {chosen} alone, {kind}", got, y[index], VALUES)
                agree_states(f"state of rows {chosen} alone, {kind}", state, states.select_rows(end, index))
            others = torch.cat([subject.disturb(inputs, 0, 6.0)[:1], inputs[1:]])
            got, state = subject.run(module, others, start)
            agree(f"outputs of rows that stayed when row 0 changed, {kind}", got[1:], y[1:], BITS)
            stayed = torch.arange(1, subject.batch)
            agree_states(
                f"state of rows that stayed when row 0 changed, {kind}",
                states.select_rows(state, stayed),
                states.select_rows(end, stayed),
                BITS,
            )


def _brief(sizes: list[int]) -> str:
    return f"1 x {len(sizes)}" if set(sizes) == {1} else "+".join(map(str, sizes))


def _ragged_sizes(time: int) -> list[int]:
    return [7, 1, 3, time - 8, 4, 1]


def _ragged_mask(subject: Subject, sizes: list[int]) -> Tensor:
    """Return masks in which row r has r fewer tokens in one chunk and r more in the next;
    some rows, and once all rows, have none."""
    row = torch.arange(subject.batch)
    masks = []
    for index, size in enumerate(sizes):
        counts = (size - 2 * row).clamp_min(0) if index % 2 == 0 else (1 + 3 * row).clamp_max(size)
        masks.append(subject.mask(counts * (index != 2), size, seed=index))
    return torch.cat(masks, dim=1)


def _reset_positions(subject: Subject) -> list[Tensor]:
    """Return different positions per row with one row without any; and every row reset at its first token and later."""
    unlike = torch.zeros(subject.batch, subject.time, dtype=torch.bool)
    for row in range(1, subject.batch):
        unlike[row, [3 * row, 3 * row + 1, 3 * row + 2, subject.time - 2 * row]] = True
    alike = torch.zeros_like(unlike)
    alike[:, [0, 13]] = True
    return [unlike, alike]
