"""The laws of arithmetic: dtypes, autocast, other implementations, numerical gradients, compilation."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import State
from kinformer.testing.declared import alike
from kinformer.testing.derivatives import agree_derivatives, agree_gradients
from kinformer.testing.errors import require
from kinformer.testing.scenario import agree_outcomes, outcome, starts
from kinformer.testing.sequences import Plan, absorb
from kinformer.testing.subject import MixerSubject, named_leaves

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Allowed error of all outputs together, relative to their norm: rounding of a few operations in each dtype."""


CLOSE_AT_LARGE = {torch.float16: 0.05, torch.bfloat16: 0.3}
"""Allowed error of outputs of large tokens, relative to their norm."""
LARGE = 30.0
"""The factor that makes tokens large: squares and sums of them exceed the range of float16, the tokens do not."""


def dtype(subject: MixerSubject) -> None:
    """Check that other dtypes give outputs of their own dtype near the float64
    ones; states keep theirs; autocast runs."""
    inputs = subject.inputs(subject.batch, subject.time, seed=71)
    with torch.no_grad():
        want = _in_two_chunks(subject, subject.build(), inputs)
        for kind in CLOSE:
            got = _in_two_chunks(subject, subject.build(kind), inputs.to(kind))
            require(got.dtype == kind, f"outputs are {got.dtype} for inputs and weights of {kind}.")
            _agree_in_norm(f"outputs in {kind} against float64", got, want, CLOSE[kind])
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            got = _in_two_chunks(subject, subject.build(torch.float32), inputs.float())
        _agree_in_norm("outputs under autocast against float64", got, want, CLOSE[torch.bfloat16])


def half_precision(subject: MixerSubject) -> None:
    """Check that large tokens, a token of zeros and padding give finite outputs in half precision, near the outputs in
    float32 with the same rounded weights and inputs."""
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
    require(
        bool(got.isfinite().all()), f"large, zero or padded tokens give outputs in {kind} that are not finite{case}."
    )
    _agree_in_norm(f"outputs of large tokens in {kind} against float32{case}", got, want.double(), tolerance)


def _agree_in_norm(place: str, got: Tensor, want: Tensor, tolerance: float) -> None:
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
        if autocast:
            _check_accumulators(state)
    return torch.cat(outputs, dim=1)


def _check_accumulators(state: State) -> None:
    for name, leaf, is_slots in named_leaves(state):
        if leaf.is_floating_point() and not is_slots:
            require(leaf.element_size() >= 4, f"the accumulator {name} is {leaf.dtype} under autocast, not float32.")


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
    """Check that analytic gradients by inputs, initial state and weights are the numerical ones (3 tokens after 2)."""
    module = subject.build()
    agree_gradients(*_as_function(subject, module), module, "inputs, initial state", "")


def derivatives(subject: MixerSubject) -> None:
    """Check that second derivatives and those of forward mode are the numerical ones, or raise (3 tokens after 2)."""
    for name, make in {"the default": subject.make, **subject.impls}.items():
        agree_derivatives(f"implementation {name!r}", *_as_function(subject, subject.build(make=make)))


def _as_function(subject: MixerSubject, module: CausalMixer) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """Return outputs and final state as a function of inputs, initial state and weights, and these as leaves."""
    start = subject.started(module, batch=1, time=2)
    names = [name for name, _ in module.named_parameters()]
    leaves = [subject.inputs(1, 3, seed=73), *filter(_moves, states.tensors(start)), *module.parameters()]

    def function(inputs: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        replacements = iter(rest)
        state = states.map_tensors(lambda leaf: next(replacements) if _moves(leaf) else leaf, start)
        weights = dict(zip(names, replacements, strict=True))
        y, end = torch.func.functional_call(module, weights, (Chunk(inputs), state))
        return y, *filter(_moves, states.tensors(end))

    return function, [leaf.detach().clone().requires_grad_() for leaf in leaves]


def _moves(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() > 0


def compile_(subject: MixerSubject) -> None:
    """Check that ``torch.compile(fullgraph=True)`` captures the forward; outputs,
    state and gradients are the eager ones."""
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
