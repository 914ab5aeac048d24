"""Stacks of layers one after the other: each once, in stages that join patches, or the same layers again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import Config
from kinformer.core.contract import Chunk, StateOptions, state_dtype
from kinformer.core.encoder import GridOnly, SequenceContext
from kinformer.core.learning import AuxLoss
from kinformer.core.parts import Position
from kinformer.core.stack import BeforeUse, Stack, StackConfig
from kinformer.core.state import State
from kinformer.runtime.compiling import has_data
from kinformer.runtime.errors import KinformerError, plural


class Sequential(Stack):
    """One layer after the other, each once: the stack of most members."""

    opens_values = True

    class Config(StackConfig):
        kind = "sequential"

        def select(self, layers: Sequence[int]) -> Sequential.Config:
            return self

        def build(self, layers: Sequence[nn.Module]) -> Sequential:
            return Sequential(self, layers)


class Stages(GridOnly, Stack):
    """Stages of layers: between two stages, four patches become one, twice as wide (Liu et al. 2021, Swin, section
    3.1).

    x -> W norm([x_(2i, 2j); x_(2i+1, 2j); x_(2i, 2j+1); x_(2i+1, 2j+1)])

    Stage i has ``depths[i]`` layers of the width dim * 2^i, on a grid of patches that was halved i times. ``norm``
    stands ``before`` the product that merges four patches, as in Swin, or ``behind`` it, as in Swin V2. A grid with odd
    sides is padded with zeros.
    """

    class Config(StackConfig):
        kind = "stages"
        depths: tuple[int, ...] = (2, 2)
        norm: Literal["before", "behind"] = "before"

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.depths or min(self.depths) < 1:
                raise KinformerError(f"depths must be layers of each stage, 1 or more, but is {self.depths}.")

        def stage_of(self, layer: int) -> int:
            """Return the number of a layer's stage."""
            return next(i for i in range(len(self.depths)) if layer < sum(self.depths[: i + 1]))

        def width(self, dim: int) -> int:
            return dim << len(self.depths) - 1

        def widths(self, dim: int, layers: int) -> tuple[int, ...]:
            if sum(self.depths) != layers:
                raise KinformerError(
                    f"stack.depths is {list(self.depths)}, {plural(sum(self.depths), 'layer')} together, but the "
                    f"model has {layers}; give both alike, as in `set` layers=4 `set` stack.depths=[2,2]."
                )
            return tuple(dim << self.stage_of(layer) for layer in range(layers))

        def select(self, layers: Sequence[int]) -> StackConfig:
            stages = [self.stage_of(layer) for layer in layers]
            return self.replace(depths=tuple(stages.count(stage) for stage in range(len(self.depths))))

        def check(self, position: nn.Module) -> None:
            if isinstance(position, Position) and type(position).layer_input is not Position.layer_input:
                raise KinformerError(
                    "the stack 'stages' has fewer patches from stage to stage, but this position enters every layer; "
                    "use another position, such as `set` position=none."
                )

        def build_model(self, layers: Sequence[nn.Module], dim: int) -> Stages:
            return Stages(self, layers, dim)

    config: Config

    def __init__(self, config: Config, layers: Sequence[nn.Module], dim: int) -> None:
        if any(hasattr(layer, "initial_state") for layer in layers):
            raise KinformerError(
                "the stack 'stages' is for the patches of images, which no decoder reads; leave it out."
            )
        super().__init__(config, layers)
        self.merges = nn.ModuleList(
            PatchMerging(dim << stage, config.norm == "behind") for stage in range(len(config.depths) - 1)
        )

    def read(
        self, x: Tensor, context: SequenceContext, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        stages = [self.config.stage_of(number) for number in range(len(self.layers))]
        tapped = []
        for number, layer in enumerate(self.layers):
            if stages[number] > stages[number - 1]:  # never for number 0, as stages[-1] is the last stage
                x, context = self.merges[stages[number] - 1](x, context)
            x = self._read(layer, x, context)
            if number in taps:
                tapped.append(x)
        return x, tuple(tapped)


class PatchMerging(nn.Module):
    """Merges four patches into one: x [batch, rows * columns, dim] -> [batch, half the rows * half the columns, 2 dim],
    and the context of the smaller grid."""

    def __init__(self, dim: int, norm_behind: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * dim if norm_behind else 4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm_behind = norm_behind

    def forward(self, x: Tensor, context: SequenceContext) -> tuple[Tensor, SequenceContext]:
        grid = context.grid
        assert grid is not None, "a model of patches alone"
        x = functional.pad(x.unflatten(1, grid), (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
        four = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)
        y = self.norm(self.reduction(four)) if self.norm_behind else self.reduction(self.norm(four))
        return y.flatten(1, 2), context._replace(grid=(y.shape[1], y.shape[2]))


# The Universal Transformer (Dehghani et al. 2019): the same layers for a number of steps or until a token halts.
#
# A *step* applies all layers once, with the same weights in every step. Every use of a layer has a separate state.
# Without halting, the stack equals ``steps`` times as many tied layers. With halting, a token takes steps until it
# halts. Halting depends only on the token and its past, so chunks of any length give equal results.
#
# The state of every later step still absorbs a halted token, since later tokens may attend to it there. Nothing else is
# computed for a halted token: with the layer ``decoder`` and softmax attention, only its key and its value are
# computed, and the output projection and the feed-forward are computed for running tokens alone, in training too.
# Attention is left out if no token of the chunk runs, as in generation; in longer chunks it is computed for all
# queries. Other mixers, and an encoder's mixers, run in full, and then only running tokens enter the feed-forward.
# Other layers run in full. An encoder leaves out a step that no token takes. While a graph is captured, and where
# tensors are shapes alone, all tokens take all steps, with equal results: estimated costs are costs without early
# halting.


# Halting: the decision of each token after a step, and its progress.


class HaltingState(NamedTuple):
    """The progress of halting tokens before step ``number``: their outputs so far, ``out`` [batch, time, dim], the
    probability ``halted`` [batch, time] of having halted, and whether each token is ``running`` [batch, time]."""

    number: int
    out: Tensor
    halted: Tensor
    running: Tensor


class HaltingConfig(Config):
    """The config of halting, with fields ``weight`` and ``halted``; ``build(dim)`` returns a module that decides after
    every step which tokens continue."""

    slot = "halting"

    def build(self, dim: int) -> ACT:
        return self.builds(self, dim)


class Decided(NamedTuple):
    """The decision after a step: the ``progress``, and the step's ponder ``cost`` [batch], summed over positions."""

    progress: HaltingState
    cost: Tensor


class ACT(nn.Module):
    """Adaptive computation time of positions (Graves 2016; Dehghani et al. 2019, section 2.2), as in tensor2tensor.

    With x the input of a step, y its output and h the sum of the probabilities of earlier steps, a running token has

        p = sigmoid(w . x + b)        it halts now if h + p > threshold, with the weight u = 1 - h, else u = p
        basic          out = u y + (1 - u) out,    out begins at 0
        accumulated    out = out + u y,    out begins at 0

    ``basic`` is the default of the official code, ``accumulated`` is Graves' sum. A token that still runs after the
    last step does not get a remainder. The ponder cost of a token is the number of its steps, without a gradient, plus
    its remainder 1 - h. The weight w begins at 0 and b at ``bias``, so that at first tokens take equal steps.

    ``halted`` is the treatment of a halted token. With ``copied``, as in the paper, the vector of the token stays
    unchanged, and each later step absorbs it with the step's position signals. With ``evolving``, as in the official
    code, the token takes all steps and other tokens see its vectors, but its output stays; then no work is saved.
    ``weight`` is the weight of the ponder cost in the loss.
    """

    class Config(HaltingConfig):
        kind = "act"
        LEAST = {"weight": 0}
        output: Literal["basic", "accumulated"] = "basic"
        threshold: float = 0.99
        bias: float = 1.0
        weight: float = 0.01
        halted: Literal["copied", "evolving"] = "copied"

        def __post_init__(self) -> None:
            if not 0 < self.threshold < 1:
                raise KinformerError(f"halting.threshold must lie between 0 and 1, but is {self.threshold:g}.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.w = nn.Parameter(torch.zeros(dim))
        self.b = nn.Parameter(torch.full((), config.bias))

    def begin(self, x: Tensor, valid: Tensor | None) -> HaltingState:
        """Return the progress before the first step of x [batch, time, dim], where all valid tokens run."""
        halted = x.new_zeros(x.shape[:2], dtype=state_dtype(x.dtype))
        running = torch.ones_like(halted, dtype=torch.bool) if valid is None else valid
        return HaltingState(0, torch.zeros_like(x, dtype=halted.dtype), halted, running)

    def forward(self, progress: HaltingState, x: Tensor, y: Tensor) -> Decided:
        """Decide after a step from x to y, [batch, time, dim] each; y of halted tokens is ignored."""
        number, out, halted, running = progress
        p = ((x.to(halted.dtype) * self.w.to(halted.dtype)).sum(-1) + self.b).sigmoid()
        # A token with h + p > threshold halts now, with the remainder 1 - h as its weight.
        still = running & (halted + p <= self.config.threshold)
        rest = torch.where(running & ~still, 1 - halted, 0.0)
        share = torch.where(still, p, rest)[..., None]
        if self.config.output == "basic":
            # u y + (1 - u) out
            out = torch.lerp(out, y.to(out.dtype), share)
        else:
            out = out + share * y.to(out.dtype)
        return Decided(HaltingState(number + 1, out, halted + share[..., 0], still), (running + rest).sum(1))


ApplyLayer = Callable[[int, Tensor, Tensor | None], Tensor]
"""(number of the use, x [batch, time, dim], the tokens that need an output [batch, time], None for all) -> y."""


class PonderState(NamedTuple):
    """The state ``layer`` of one use, and ``aux`` [batch]: the ponder cost of the steps that began with it."""

    layer: State
    aux: Tensor

    aux_name = "ponder"  # type: ignore[misc]


class Universal(Stack):
    """The universal stack: ``layers`` in order, ``steps`` times."""

    class Config(StackConfig):
        kind = "universal"
        LEAST = {"steps": 1}
        steps: int = 6
        halting: HaltingConfig | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.halting is not None and self.stochastic_depth:
                raise KinformerError(
                    f"stack.stochastic_depth is {self.stochastic_depth:g} and drops sublayers for whole sequences, but "
                    "with stack.halting tokens of a sequence take different steps; leave either out."
                )

        def uses(self, layers: int) -> tuple[int, ...]:
            return tuple(range(layers)) * self.steps

        def select(self, layers: Sequence[int]) -> StackConfig:
            return self.replace(steps=1)

        def build_model(self, layers: Sequence[nn.Module], dim: int) -> Universal:
            return Universal(self, layers, dim)

    config: Config

    def __init__(self, config: Config, layers: Sequence[nn.Module], dim: int) -> None:
        super().__init__(config, layers)
        self.group = len(self.layers)
        self.halting: ACT | None = None if config.halting is None else config.halting.build(dim)
        self.adaptive = self.halting is not None
        if self.halting is not None:
            self.pondered = AuxLoss(PonderState.aux_name)

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
        layers = super().initial_state(batch, **options)
        if self.halting is None:
            return layers
        like = self.halting.w
        aux = torch.zeros(
            batch, device=options.get("device") or like.device, dtype=state_dtype(options.get("dtype") or like.dtype)
        )
        return tuple(PonderState(layer, aux) for layer in layers)  # type: ignore[call-arg]

    def absorb(
        self, chunk: Chunk, state: tuple[State, ...], before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]]:
        if self.halting is None:
            return super().absorb(chunk, state, before, taps)
        after: list[PonderState] = []

        def use(number: int, x: Tensor, output_mask: Tensor | None) -> Tensor:
            y, new_state = self._run_use(number, chunk._replace(x=x), state[number].layer, output_mask)
            after.append(state[number]._replace(layer=new_state))
            return y

        x, tapped, costs = self._run_halting(self.halting, chunk.x, chunk.valid, use, before, taps)
        for step, cost in enumerate(costs):
            first = after[step * self.group]
            after[step * self.group] = first._replace(aux=first.aux + cost)
        return x, tuple(after), tapped

    def read(
        self, x: Tensor, context: SequenceContext, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.halting is None:
            return super().read(x, context, before, taps)

        def use(number: int, x: Tensor, output_mask: Tensor | None) -> Tensor:
            if output_mask is not None and not output_mask.any():
                return x
            return self._read(self.layers[self.order[number]], x, context, output_mask)

        x, tapped, costs = self._run_halting(self.halting, x, context.valid, use, before, taps)
        self.pondered(torch.stack(costs).sum(0))
        return x, tapped

    def _run_halting(
        self, halting: ACT, x: Tensor, valid: Tensor | None, use: ApplyLayer, before: BeforeUse, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
        """Run all steps; return the outputs, the outputs of ``taps``, and the ponder cost [batch] of every step."""
        tapped, costs = [], []
        progress = halting.begin(x, valid)
        for step in range(self.config.steps):
            output_mask, read = self._output_mask(progress), x
            for number in range(step * self.group, (step + 1) * self.group):
                entered = before(x, number)
                read = entered if number % self.group == 0 else read
                # The vector of a halted token does not change: drop the layer's result for it.
                x = torch.where(self._running(progress), use(number, entered, output_mask), x)
                if number in taps:
                    tapped.append(x)
            progress, cost = halting(progress, read, x)
            costs.append(self._halting.weight * cost)
        return progress.out.to(x.dtype), tuple(tapped), costs

    @property
    def _halting(self) -> Any:
        return self.config.halting

    def _output_mask(self, progress: HaltingState) -> Tensor | None:
        """Return the tokens [batch, time] whose outputs a step must compute; None for all tokens."""
        running = progress.running
        if self._halting.halted == "evolving" or torch.compiler.is_compiling() or not has_data(running):
            return None
        return None if progress.number == 0 or bool(running.all()) else running

    def _running(self, progress: HaltingState) -> Tensor:
        """Return the tokens [batch, time, 1] whose vectors a step changes."""
        running = progress.running[..., None]
        return torch.ones_like(running) if self._halting.halted == "evolving" else running


PARTS = {
    "SequentialStack": Sequential.Config,
    "StagedStack": Stages.Config,
    "UniversalStack": Universal.Config,
    "ACT": ACT.Config,
}
