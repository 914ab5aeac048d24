"""Encoders under examination: a mixer over a sequence or a whole model, their inputs, and the same without padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.encoder import EncoderMixer, SequenceContext
from kinformer.testing.subject import built, draw


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


class EncoderSubject(ABC):
    """The encoder under examination, which this class builds and runs on ``Case``s."""

    def __init__(self, make: Callable[[], nn.Module], batch: int, time: int) -> None:
        self.make, self.batch, self.time = make, batch, time

    def build(self, dtype: torch.dtype = torch.float64, make: Callable[[], nn.Module] | None = None) -> nn.Module:
        """Return a fresh module in eval mode with the same weights on every call."""
        return built(make or self.make, dtype)

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
    """An :class:`EncoderMixer` of width ``dim``, on plain sequences and on those with global tokens and a global input.

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
    """An encoder of tokens, ``logits = model(tokens, valid=, kinds=)``, whose logits are those of tokens or of
    sequences.

    Padding may stand anywhere. ``global_tokens`` False leaves ``kinds`` out, for a model that refuses them. ``shape``:
    of a position that is no id but numbers, as frames of sound are, [batch, time, *shape].
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

    Images have no padding, so that the check of padding is not for them.
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
