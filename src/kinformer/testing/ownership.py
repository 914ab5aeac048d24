"""The laws of ownership: a value state is never written to, a reserved one has a single owner."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError
from kinformer.testing.errors import BITS, VALUES, agree, agree_states, require
from kinformer.testing.scenario import starts
from kinformer.testing.subject import Subject, draw

STEPS = (1, 1, 3, 1, 5, 2)


def purity(subject: Subject) -> None:
    """Check that the same state twice gives the same result; neither state nor
    inputs nor the module's own tensors change."""
    for grad in (True, False):
        module = subject.build()
        for kind, start in starts(subject, module):
            with torch.set_grad_enabled(grad):
                _twice(subject, module, start, f"{kind}, {'with' if grad else 'without'} gradients")


def _twice(subject: Subject, module: nn.Module, start: State, place: str) -> None:
    inputs, others = (subject.inputs(subject.batch, subject.time, seed) for seed in (21, 22))
    watched = {"inputs": inputs}
    watched |= {f"leaf {i} of the state": leaf for i, leaf in enumerate(() if start is None else states.tensors(start))}
    watched |= {f"{name} of the module": tensor for name, tensor in module.state_dict().items()}
    before = {name: tensor.detach().clone() for name, tensor in watched.items()}

    y, end = subject.call(module, inputs, start)
    y_before, end_before = y.detach().clone(), states.detach(states.fork(end))
    subject.call(module, others, end)
    again, end_again = subject.call(module, inputs, start)

    agree(f"outputs when the same state is used twice, {place}", again, y_before, BITS)
    agree_states(f"state when the same state is used twice, {place}", end_again, end_before, BITS)
    agree(f"outputs once a later chunk was absorbed, {place}", y, y_before, 0.0)
    agree_states(f"state once a later chunk was absorbed, {place}", end, end_before, 0.0)
    for name, tensor in watched.items():
        require(torch.equal(tensor.detach(), before[name]), f"{name} was written to, {place}.")


def reserved(subject: Subject) -> None:
    """Check that a reserved state acts as the value state: same results, one owner, forks, ragged rows and resets; an
    earlier one that is reclaimed goes on as if what came after it had never been there."""
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
        owned, state = states.reserve(states.fork(start), total), start
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
    """Check that a consumed state is refused, and a value taken before is not written to."""
    owned = states.reserve(states.fork(start), subject.time)
    if not has_reserved(owned):
        return
    inputs = subject.inputs(subject.batch, 3, seed=41)
    taken = states.value(owned)
    agree_states(f"value of a fresh reservation, {kind}", taken, start, 0.0)
    _, successor = subject.call(module, inputs, owned)
    agree_states(f"value taken before a step of the reservation, {kind}", taken, start, 0.0)
    require(has_reserved(successor), f"a step of a reserved state gave back a value state, {kind}.")
    for use, act in {
        "stepped again": lambda: subject.call(module, inputs, owned),
        "forked": lambda: states.fork(owned),
        "read": lambda: states.value(owned),
    }.items():
        try:
            act()
        except KinformerError:
            continue
        require(False, f"a reserved state that was already used could be {use}, {kind}; expected a KinformerError.")


def _forks(subject: Subject, module: nn.Module, start: object, kind: str) -> None:
    """Check that fork, selected rows and original go on independently, in turns."""
    tokens = [subject.inputs(subject.batch, 2, seed) for seed in (51, 52, 53)]
    _, owned = subject.call(module, tokens[0], states.reserve(states.fork(start), subject.time))
    _, state = subject.run(module, tokens[0], start)
    order = torch.arange(subject.batch).flip(0)
    branches = {
        "the original": (owned, state),
        "a fork": (states.fork(owned), state),
        "its rows in another order": (states.select_rows(owned, order), states.select_rows(state, order)),
    }
    for _ in range(2):
        for index, (name, (mine, plain)) in enumerate(branches.items()):
            got, mine = subject.call(module, tokens[index], mine)
            want, plain = subject.run(module, tokens[index], plain)
            agree(f"outputs of {name} beside other branches of a reserved state, {kind}", got, want, VALUES)
            agree_states(f"state of {name} beside other branches of a reserved state, {kind}", mine, plain)
            branches[name] = (mine, plain)


def _reclaims(subject: Subject, module: nn.Module, start: object, kind: str) -> None:
    """Check that an earlier state goes on as if later chunks had never been absorbed, whichever buffers they filled."""
    for before, after in ((0, 1), (2, 3), (1, subject.time)):
        owned = states.reserve(states.fork(start), before + after + 3)
        state = start
        if before:
            _, owned = subject.call(module, subject.inputs(subject.batch, before, seed=61), owned)
            _, state = subject.run(module, subject.inputs(subject.batch, before, seed=61), start)
        dropped = owned
        for seed, size in ((62, after), (63, 1)):
            _, dropped = subject.call(module, subject.inputs(subject.batch, size, seed), dropped)
        earlier = states.reclaimed(owned)
        others, valid, reset = next(_steps(subject, 2, masked=True))
        got, now = subject.call(module, others, earlier, valid, reset)
        want, state = subject.run(module, others, state, valid, reset)
        place = f"after {before} tokens when {after + 1} further ones are taken back, {kind}"
        agree(f"outputs {place}", got, want, VALUES)
        agree_states(f"state {place}", now, state)
        if before and has_reserved(dropped):  # one that no step has laid out shares no buffers with later ones
            try:
                states.value(dropped)
            except KinformerError:
                continue
            require(False, f"a reserved state could be read once an earlier one was reclaimed, {kind}.")


def has_reserved(state: State) -> bool:
    """Return whether any part of the state is reserved."""
    if isinstance(state, Tensor):
        return False
    return isinstance(state, states.ReservedState) or any(has_reserved(item) for item in state)
