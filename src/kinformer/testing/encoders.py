"""The contract of encoders as executable laws: padding, rows, dtypes, for a mixer over a sequence and for a model."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.encoder import EncoderMixer, SequenceContext
from kinformer.testing.laws import CLOSE, CLOSE_AT_LARGE, LARGE, agree_at_large, agree_in_norm
from kinformer.testing.subject import (
    BITS,
    GRADIENTS,
    VALUES,
    Examined,
    agree,
    agree_derivatives,
    agree_gradients,
    dense_gradients,
    draw,
    leaves_of,
    require,
)

# Encoders under examination: a mixer over a sequence or a whole model, their inputs, and the same without padding.


class Case(NamedTuple):
    """The inputs of one examination [batch, time, ...], their context, and a description in words.

    ``inputs`` and every tensor of ``text`` have the batch first.
    """

    name: str
    inputs: Tensor
    text: Any

    def rows(self, index: Tensor) -> Case:
        """Return some rows of the case."""
        return Case(self.name, self.inputs[index], _of_rows(self.text, index))


class EncoderSubject(Examined, ABC):
    """The encoder under examination, which this class runs on ``Case``s."""

    @abstractmethod
    def cases(self) -> Iterator[Case]:
        """Yield cases of sequences without padding."""

    @abstractmethod
    def padded(self, case: Case) -> tuple[Case, list[Case], Tensor]:
        """Return ``case`` with rubbish as padding, as much as differs by row, each of its rows alone without, and
        which tokens [batch, time] are valid."""

    @abstractmethod
    def run(self, module: nn.Module, case: Case) -> Tensor:
        """Return the outputs for a case, batch first."""


class EncoderMixerSubject(EncoderSubject):
    """An :class:`EncoderMixer` of width ``dim``, on sequences without and with global tokens and a global input.

    ``num_globals``: sizes of the global input; ``impls`` are other makers of the same mixer. ``global_tokens`` False
    leaves out sequences with global tokens in the long input, for a mixer that refuses them.
    """

    def __init__(
        self,
        make: Callable[[], EncoderMixer],
        *,
        dim: int = 16,
        batch: int = 3,
        time: int = 29,
        num_globals: tuple[int, ...] = (0, 4),
        impls: Mapping[str, Callable[[], EncoderMixer]] | None = None,
        global_tokens: bool = True,
    ) -> None:
        super().__init__(make, batch, time)
        self.dim, self.num_globals, self.impls, self.global_tokens = dim, num_globals, dict(impls or {}), global_tokens

    def cases(self) -> Iterator[Case]:
        for count in self.num_globals:
            inputs = self.inputs(count + self.time, seed=count)
            numbers = torch.arange(self.time).mul(max(count, 1)).div(self.time, rounding_mode="floor")
            sentences = torch.cat([torch.arange(count), numbers]).expand(self.batch, -1) if count else None
            yield Case(
                f"global input of {count} tokens", inputs, SequenceContext(sentences=sentences, num_global=count)
            )
            if not self.global_tokens:
                continue
            positions = torch.tensor([0, self.time // 2, self.time - 9]).repeat(self.batch, 1)
            positions[1, 2:] = -1
            yield Case(
                f"global tokens, global input of {count}", inputs, SequenceContext(None, positions, sentences, count)
            )

    def inputs(self, time: int, seed: int) -> Tensor:
        shape = (self.batch, time, self.dim)
        return draw(lambda generator: torch.randn(shape, generator=generator, dtype=torch.float64), seed)

    def padded(self, case: Case) -> tuple[Case, list[Case], Tensor]:
        count = case.text.num_global
        lengths = [max(1, self.time - 7 * row) for row in range(self.batch)]
        globals_ = [max(1, count - row) if count else 0 for row in range(self.batch)]
        slots = torch.arange(count + self.time)
        valid = torch.stack(
            [((slots < o) | (slots >= count)) & (slots < count + n) for o, n in zip(globals_, lengths, strict=True)]
        )
        text = case.text._replace(valid=valid)
        if text.global_positions is not None:
            inside = text.global_positions < torch.tensor(lengths)[:, None]
            text = text._replace(global_positions=torch.where(inside, text.global_positions, -1))
        if text.sentences is not None:
            text = text._replace(sentences=torch.minimum(text.sentences, torch.tensor(globals_)[:, None] - 1))
        spoiled = case.inputs.masked_fill(~valid[..., None], torch.nan)
        alone = [
            Case(
                case.name,
                case.inputs[row, valid[row]][None],
                SequenceContext(
                    None,
                    None if text.global_positions is None else _valid_positions(text.global_positions[row]),
                    None if text.sentences is None else text.sentences[row, valid[row]][None],
                    globals_[row],
                ),
            )
            for row in range(self.batch)
        ]
        return Case(case.name, spoiled, text), alone, valid

    def run(self, module: nn.Module, case: Case) -> Tensor:
        return module(case.inputs, case.text)


class EncoderModelSubject(EncoderSubject):
    """An encoder of tokens, ``logits = model(tokens, valid=, kinds=)``, with logits for every token or sequence.

    Padding may stand anywhere. ``global_tokens`` False leaves ``kinds`` out, for a model that refuses them. ``shape``
    is the shape of one position, for inputs [batch, time, *shape] of numbers instead of ids, such as frames of sound.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        vocab_size: int,
        *,
        batch: int = 3,
        time: int = 29,
        global_tokens: bool = True,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(make, batch, time)
        self.vocab_size, self.global_tokens, self.shape = vocab_size, global_tokens, shape

    def cases(self) -> Iterator[Case]:
        size = (self.batch, self.time)
        if self.shape is not None:
            shape = (*size, *self.shape)
            tokens = draw(lambda generator: torch.randn(shape, generator=generator, dtype=torch.float64), 1)
        else:
            tokens = draw(lambda generator: torch.randint(self.vocab_size, size, generator=generator), 1)
        yield Case("plain", tokens, {})
        if self.global_tokens:
            kinds = (draw(lambda generator: torch.rand(size, generator=generator), 4) < 0.1).long()
            yield Case("global tokens", tokens, {"kinds": kinds})

    def padded(self, case: Case) -> tuple[Case, list[Case], Tensor]:
        size = (self.batch, self.time)
        order = draw(lambda generator: torch.rand(size, generator=generator), 2).argsort(1)
        valid = order < torch.tensor([max(1, self.time - 6 * row) for row in range(self.batch)])[:, None]
        valid[0] = True
        alone = [
            Case(
                case.name,
                case.inputs[row, valid[row]][None],
                {name: value[row, valid[row]][None] for name, value in case.text.items()},
            )
            for row in range(self.batch)
        ]
        if self.shape is None:
            spoiled = torch.where(valid, case.inputs, (case.inputs + 7) % self.vocab_size)
        else:
            spoiled = case.inputs.masked_fill(~valid.view(*valid.shape, *[1] * len(self.shape)), torch.nan)
        return Case(case.name, spoiled, case.text | {"valid": valid}), alone, valid

    def run(self, module: nn.Module, case: Case) -> Tensor:
        return module(case.inputs, **case.text)


class ImageModelSubject(EncoderSubject):
    """An encoder of images, ``logits = model(images)`` with images [batch, channels, height, width], on several sizes.

    Images do not have padding, so the check of padding is left out.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        *,
        channels: int = 3,
        batch: int = 3,
        sizes: Sequence[tuple[int, int]] = ((32, 32), (13, 26)),
    ) -> None:
        super().__init__(make, batch, 0)
        self.channels, self.sizes = channels, sizes

    def cases(self) -> Iterator[Case]:
        for seed, (rows, columns) in enumerate(self.sizes, start=1):
            shape = (self.batch, self.channels, rows, columns)
            images = draw(lambda rng: torch.rand(shape, generator=rng, dtype=torch.float64), seed)  # noqa: B023
            yield Case(f"images of {rows} x {columns}", images, {})

    def padded(self, case: Case) -> tuple[Case, list[Case], Tensor]:
        raise NotImplementedError("images have no padding")

    def run(self, module: nn.Module, case: Case) -> Tensor:
        return module(case.inputs)


def _valid_positions(positions: Tensor) -> Tensor | None:
    positions = positions[positions >= 0]
    return positions[None] if len(positions) else None


def _of_rows(text: SequenceContext | dict[str, Tensor], index: Tensor) -> SequenceContext | dict[str, Tensor]:
    if isinstance(text, dict):
        return {name: value[index] for name, value in text.items()}
    changed: dict[str, Any] = {name: x[index] for name, x in text._asdict().items() if isinstance(x, Tensor)}
    return text._replace(**changed)


def padding(subject: EncoderSubject) -> None:
    """Check that sequences in one batch, with random numbers as padding, give each sequence's values and gradients."""
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
    """Check that later tokens are seen: changing the last token moves the first output, in some case."""
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
    """Check that outputs in other dtypes have this dtype and are near the float64 outputs, and that autocast runs."""
    with torch.no_grad():
        for case in subject.cases():
            want = subject.run(subject.build(), case)
            for kind, tolerance in CLOSE.items():
                got = subject.run(subject.build(kind), case._replace(inputs=case.inputs.to(kind)))
                require(got.dtype == kind, f"outputs are {got.dtype} for inputs and weights of {kind}.")
                agree_in_norm(f"outputs in {kind}, {case.name}", got, want, tolerance)
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                got = subject.run(subject.build(torch.float32), case._replace(inputs=case.inputs.float()))
            agree_in_norm(f"outputs under autocast, {case.name}", got, want, CLOSE[torch.bfloat16])


def half_precision(subject: EncoderSubject) -> None:
    """Check that large tokens, zeros and padding give finite outputs in half precision, near the float32 outputs."""
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
            _agree_outcomes(f"implementation {name!r}, {case.name}", got, want)


def gradcheck(subject: EncoderMixerSubject) -> None:
    """Check that analytic gradients by inputs and weights equal numerical gradients."""
    module = subject.build()
    for case in subject.cases():
        agree_gradients(*_as_function(module, case), module, "inputs", f", {case.name}")


def derivatives(subject: EncoderMixerSubject) -> None:
    """Check that second derivatives and forward-mode derivatives equal numerical derivatives, or raise an error."""
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
            got = _outcome(subject, module, case, run=lambda case: compiled(case.inputs, case.text))  # noqa: B023
        _agree_outcomes(f"compiled against eager, {case.name}", got, want)


def _agree_outcomes(place: str, got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    agree(f"{place}, outputs", got[0], want[0], VALUES)
    for name, gradient in want[1].items():
        agree(f"{place}, gradient of {name}", got[1][name], gradient, GRADIENTS)


def _outcome(
    subject: EncoderSubject,
    module: nn.Module,
    case: Case,
    valid: Tensor | None = None,
    run: Callable[[Case], Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs, and the gradients of their sum weighted by feature, padding left out."""
    inputs, leaves = leaves_of(module, case.inputs)
    case = case._replace(inputs=inputs)
    outputs = picked = subject.run(module, case) if run is None else run(case)
    if valid is not None and outputs.shape[:2] == valid.shape:
        picked = outputs[valid]
    loss = (picked.flatten(0, -2) * torch.linspace(-1, 1, outputs.shape[-1], dtype=outputs.dtype)).square().sum()
    return outputs.detach(), dict(zip(leaves, dense_gradients(loss, list(leaves.values())), strict=True))
