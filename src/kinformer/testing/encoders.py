"""The contract of encoders as executable laws: padding, rows, dtypes, for a mixer over a sequence and for a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kinformer.testing.derivatives import agree_derivatives, agree_gradients, dense_gradients
from kinformer.testing.encoder_subject import Case, EncoderMixerSubject, EncoderSubject
from kinformer.testing.errors import BITS, GRADIENTS, VALUES, agree, require
from kinformer.testing.numerics import CLOSE_AT_LARGE, LARGE, agree_at_large

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def padding(subject: EncoderSubject) -> None:
    """Check that sequences of different lengths in one batch, rubbish in their padding, are
    as each alone, in values and gradients."""
    module = subject.build()
    for case in subject.cases():
        together, alone, valid = subject.padded(case)
        want = [_outcome(subject, module, one) for one in alone]
        got, gradients = _outcome(subject, module, together, valid)
        per_text = got.shape[1:2] != valid.shape[1:] or got.dim() == 2
        for row, (one, _) in enumerate(want):
            mine = got[row] if per_text else got[row, valid[row]]
            agree(f"outputs of row {row} among others, {case.name}", mine, one[0], VALUES)
        if not per_text:
            require(not bool(got[~valid].any()), f"outputs at invalid positions are not zero, {case.name}.")
        for name, gradient in gradients.items():
            if name != "inputs":
                total = torch.stack([item[1][name] for item in want]).sum(0)
                agree(f"the gradient of {name}, {case.name}", gradient, total, GRADIENTS)
        require(all(bool(g.isfinite().all()) for g in gradients.values()), f"a gradient is not finite, {case.name}.")


def rows(subject: EncoderSubject) -> None:
    """Check that rows permuted, repeated or among others give the same outputs; a second call gives the same."""
    module = subject.build()
    with torch.no_grad():
        for case in subject.cases():
            want = subject.run(module, case)
            agree(f"outputs of a second call, {case.name}", subject.run(module, case), want, BITS)
            for chosen in (list(range(subject.batch))[::-1], [0], [subject.batch - 1, 0, 0]):
                index = torch.tensor(chosen)
                got = subject.run(module, case.rows(index))
                agree(f"outputs of rows {chosen} alone, {case.name}", got, want[index], VALUES)


def both_ways(subject: EncoderSubject) -> None:
    """Check that later tokens are seen: changing the last token moves the first
    output (through some token, in some case)."""
    module = subject.build()
    with torch.no_grad():
        moved = 0.0
        for case in subject.cases():
            other = case.inputs.clone()
            other[:, -1] = other[:, -1] * 3 + 1 if other.is_floating_point() else (other[:, -1] + 5) % 11
            gap = subject.run(module, case._replace(inputs=other)) - subject.run(module, case)
            moved = max(moved, float(gap[:, : max(1, gap.shape[1] - 1)].abs().max()))
    require(moved > 0, "no output but the last depends on the last token: this mixer is causal.")


def dtype(subject: EncoderSubject) -> None:
    """Check that other dtypes give outputs of their own dtype near the float64 ones; autocast runs."""
    with torch.no_grad():
        for case in subject.cases():
            want = subject.run(subject.build(), case)
            for kind, tolerance in CLOSE.items():
                got = subject.run(subject.build(kind), case._replace(inputs=case.inputs.to(kind)))
                require(got.dtype == kind, f"outputs are {got.dtype} for inputs and weights of {kind}.")
                _near(f"outputs in {kind}, {case.name}", got, want, tolerance)
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                got = subject.run(subject.build(torch.float32), case._replace(inputs=case.inputs.float()))
            _near(f"outputs under autocast, {case.name}", got, want, CLOSE[torch.bfloat16])


def half_precision(subject: EncoderSubject) -> None:
    """Check that large tokens, a token of zeros and padding give finite outputs in half precision, near the outputs in
    float32 with the same rounded weights and inputs."""
    with torch.no_grad():
        for case in subject.cases():
            inputs = LARGE * case.inputs
            inputs[:, 3] = 0
            case, _, _ = subject.padded(case._replace(inputs=inputs))
            for kind, tolerance in CLOSE_AT_LARGE.items():
                module, rounded = subject.build(kind), case.inputs.to(kind)
                got = subject.run(module, case._replace(inputs=rounded))
                want = subject.run(module.float(), case._replace(inputs=rounded.float()))
                agree_at_large(f", {case.name}", kind, got, want, tolerance)


def implementations(subject: EncoderMixerSubject) -> None:
    """Check that every other implementation with the same weights gives the same outputs and gradients, padded too."""
    oracle = subject.build(make=subject.impls.get("reference"))
    others = {name: make for name, make in subject.impls.items() if name != "reference"}
    for name, make in {"the default": subject.make, **others}.items():
        module = subject.build(make=make)
        module.load_state_dict(oracle.state_dict())
        for plain in subject.cases():
            case, _, valid = subject.padded(plain)
            got, want = (_outcome(subject, item, case, valid) for item in (module, oracle))
            agree(f"outputs of {name!r}, {case.name}", got[0], want[0], VALUES)
            for key, gradient in want[1].items():
                agree(f"the gradient of {key} by {name!r}, {case.name}", got[1][key], gradient, GRADIENTS)


def gradcheck(subject: EncoderMixerSubject) -> None:
    """Check that analytic gradients by inputs and weights are the numerical ones."""
    module = subject.build()
    for case in subject.cases():
        agree_gradients(*_as_function(module, case), module, "inputs", f", {case.name}")


def derivatives(subject: EncoderMixerSubject) -> None:
    """Check that second derivatives and those of forward mode are the numerical ones, or raise."""
    for name, make in {"the default": subject.make, **subject.impls}.items():
        module = subject.build(make=make)
        for case in subject.cases():
            agree_derivatives(f"implementation {name!r}, {case.name}", *_as_function(module, case))


def _as_function(module: nn.Module, case: Case) -> tuple[Callable[..., tuple[Tensor]], list[Tensor]]:
    """Return the outputs of the first row as a function of inputs and weights, and these as leaves."""
    one = case.rows(torch.tensor([0]))
    names = [name for name, _ in module.named_parameters()]

    def function(inputs: Tensor, *weights: Tensor) -> tuple[Tensor]:
        return (torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (inputs, one.text)),)

    return function, [leaf.detach().clone().requires_grad_() for leaf in (one.inputs, *module.parameters())]


def compile_(subject: EncoderMixerSubject) -> None:
    """Check that ``torch.compile(fullgraph=True)`` captures the forward of sequences without padding."""
    for case in subject.cases():
        torch.compiler.reset()
        module = subject.build()
        want = _outcome(subject, module, case)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            got = _outcome(subject, module, case, run=_through(compiled))
        agree(f"compiled outputs, {case.name}", got[0], want[0], VALUES)
        for key, gradient in want[1].items():
            agree(f"the compiled gradient of {key}, {case.name}", got[1][key], gradient, GRADIENTS)


def _outcome(
    subject: EncoderSubject,
    module: nn.Module,
    case: Case,
    valid: Tensor | None = None,
    run: Callable[[Case], Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs, and the gradients of their sum weighted by feature, padding left out."""
    leaves: dict[str, Tensor] = {
        f"parameter {name}": named_parameter
        for name, named_parameter in module.named_parameters()
        if named_parameter.requires_grad
    }
    inputs = case.inputs.clone()
    if inputs.is_floating_point():
        leaves["inputs"] = inputs.requires_grad_()
    case = case._replace(inputs=inputs)
    outputs = subject.run(module, case) if run is None else run(case)
    picked = outputs
    if valid is not None and outputs.shape[:2] == valid.shape:
        picked = outputs[valid]
    loss = (picked.flatten(0, -2) * torch.linspace(-1, 1, outputs.shape[-1], dtype=outputs.dtype)).square().sum()
    return outputs.detach(), dict(zip(leaves, dense_gradients(loss, list(leaves.values())), strict=True))


def _near(place: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    error = float((got.double() - want).norm() / want.norm())
    require(error <= tolerance, f"{place}: off by {error:.3g} of their norm; at most {tolerance:g} is allowed.")


def _through(module: Callable[..., Tensor]) -> Callable[[Case], Tensor]:
    return lambda case: module(case.inputs, case.text)
