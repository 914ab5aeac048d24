"""Early exits: a token leaves after some layers, as a rule decides from its past (Elbayad et al. 2020, section 3;
Schuster et al. 2022, section 3).

With h^l the output of layer l, a token that leaves after layer l is predicted from h^l, and every later layer absorbs
h^l in its place, each by its own keys and values, so that later tokens find it there (the papers' copied state, or
state propagation). Without a rule, and in aligned training, all tokens go through all layers: the sequential stack,
exactly.

With the layer ``decoder`` and softmax attention nothing else than that key and value is computed of a token that has
left; other mixers are run in full, before a feed-forward of running tokens; other layers are run in full. While a graph
is captured, and where tensors are shapes alone, all tokens go through all layers, with equal results: costs are
estimated as if no token left early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk
from kinformer.core.stack import BeforeUse, ReadExit, Stack, StackConfig
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.host import has_data
from kinformer.stacks.exit_rules import AtExit, ExitRule, ExitRuleConfig


class Exits(Stack):
    """The layers in order, with exits ``after`` some of them, counted from 1 (None: every one) and after the last.

    ``rule`` None lets no token leave early. ``classifiers``: ``tied``, one head for all exits, or ``separate``, each
    exit has a head of its own, all alike. ``training``: ``aligned``, all tokens go through all layers and the objective
    looks at every exit, or ``mixed``, each token leaves by an exit drawn evenly, ``samples`` times in a step.
    ``weights``: of the losses of exits 1, 2, ... in aligned training: their numbers (``linear``), equal (``uniform``),
    or powers of 2.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(StackConfig):
        kind = "exits"
        rule: ExitRuleConfig | None = None
        after: tuple[int, ...] | None = None
        classifiers: Literal["tied", "separate"] = "tied"
        training: Literal["aligned", "mixed"] = "aligned"
        weights: Literal["linear", "uniform", "powers"] = "linear"
        samples: int = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.after is not None and list(self.after) != sorted(set(self.after)):
                raise KinformerError(f"stack.after must name layers in order, each once, but is {list(self.after)}.")
            if self.samples < 1:
                raise KinformerError(f"stack.samples must be 1 or more, but is {self.samples}.")
            if self.training == "aligned" and self.samples > 1:
                raise KinformerError(
                    "stack.samples is how often exits are drawn in a step of mixed training; add "
                    "`set` stack.training=mixed, or leave it out."
                )
            if self.training == "mixed" and self.stochastic_depth:
                raise KinformerError(
                    f"stack.stochastic_depth is {self.stochastic_depth:g} and drops sublayers for whole sequences, but "
                    "in mixed training tokens of a sequence take different layers; give `set` stack.training=aligned."
                )
            if self.training == "mixed" and self.rule is not None and self.rule.learns:
                raise KinformerError(
                    f"the rule {self.rule.kind!r} learns from all exits of a token, but mixed training takes one; "
                    "train with `set` stack.training=aligned, or with another rule (softmax_response, saturation)."
                )

        def exits(self, layers: int) -> tuple[int, ...]:
            """Return the layers behind which exits are, from 0, the last included."""
            after = tuple(range(1, layers + 1)) if self.after is None else self.after
            if not all(1 <= layer <= layers for layer in after):
                raise KinformerError(
                    f"stack.after is {list(after)}, but there are {plural(layers, 'layer')}; name some of 1 to "
                    f"{layers}."
                )
            exits = tuple(dict.fromkeys((*(layer - 1 for layer in after), layers - 1)))
            if len(exits) == 1 < layers:
                raise KinformerError(
                    f"stack.after is {list(after)}, so that no token could leave before the last layer; name another "
                    "layer, or use the stack 'sequential'."
                )
            return exits

        @property
        def reads_exits(self) -> bool:
            return self.rule is not None

        def exit_heads(self, layers: int) -> int:
            return len(self.exits(layers)) - 1 if self.classifiers == "separate" else 0

        def build_model(self, layers: Sequence[nn.Module], dim: int) -> Exits:
            return Exits(self, layers, dim)

    config: Config

    def __init__(self, config: Config, layers: Sequence[nn.Module], dim: int) -> None:
        super().__init__(config, layers)
        if not all(hasattr(layer, "initial_state") for layer in self.layers):
            raise KinformerError(
                "the stack 'exits' lets tokens of a decoder leave, but this model is an encoder, whose layers read "
                "whole texts; use the stack 'sequential'."
            )
        self.exits = config.exits(len(self.layers))
        self.rule: ExitRule | None = None if config.rule is None else config.rule.build(dim, len(self.exits))
        # Of the rule that it was built with: it stays where another stands in for it in a measurement.
        self._reads_source = self.rule is not None and self.rule.reads_source
        self.left = Left()

    @property
    def learns(self) -> bool:
        """Return whether there are weights that only the losses of all exits train: of the rule, or of heads."""
        config = self.config
        owns = config.classifiers == "separate" or (config.rule is not None and config.rule.learns)
        return owns and config.training == "aligned"

    @property
    def reads_source(self) -> bool:
        return self._reads_source

    @property
    def leaves_early(self) -> bool:
        return self.rule is not None and not self.rule.off

    def absorb_early_exits(
        self,
        chunk: Chunk,
        state: tuple[State, ...],
        before: BeforeUse,
        taps: Sequence[int],
        read: ReadExit,
        source: Tensor | None = None,
    ) -> tuple[tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]], Tensor | None]:
        drawn = self.training and self.config.training == "mixed"
        if not drawn and (self.training or not self.leaves_early):
            return self.absorb(chunk, state, before, taps), None
        running = _Running(chunk, len(self.exits) - 1, source)
        if drawn:
            running.leaves_by = torch.randint_like(running.leaves_by, len(self.exits))
        x = earlier = chunk.x
        after, tapped = [], []
        for number in range(len(self.order)):
            y, new_state = self._used(number, chunk._replace(x=before(x, number)), state[number], running.output_mask)
            x = running.merged(x, y)
            after.append(new_state)
            if number in taps:
                tapped.append(x)
            if number in self.exits[:-1]:
                self._leave(self.exits.index(number), x, earlier, running, None if drawn else read)
                earlier = x
        self.left(running.leaves_by, chunk.valid)
        return (x, tuple(after), tuple(tapped)), running.leaves_by

    def asks(self, number: int) -> bool:
        """Return whether the rule decides at exit ``number`` which tokens leave."""
        return self.rule is not None and number < len(self.exits) - 1 and self.rule.asks(number)

    def leads(self, number: int) -> range:
        """Return the uses between the exit before exit ``number``, or the input, and that exit."""
        return range(self.exits[number - 1] + 1 if number else 0, self.exits[number] + 1)

    def until(
        self,
        number: int,
        chunk: Chunk,
        state: tuple[State, ...],
        before: BeforeUse,
        read: ReadExit,
        source: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[State, ...]]:
        """Run a chunk, all of whose tokens run, from the exit before to exit ``number``, with ``state`` of the uses
        there.

        Return the outputs of the last use, [batch, time, dim]; its logits; by which exit each token is to leave as
        decided up to there, [batch, time] int64; and the states after.
        """
        x, after = chunk.x, []
        for use, layer_state in zip(self.leads(number), state, strict=True):
            x, layer_state = self._used(use, chunk._replace(x=before(x, use)), layer_state, None)
            after.append(layer_state)
        logits = read(x, number)
        leaves = torch.full(x.shape[:2], len(self.exits) - 1, device=x.device)
        if self.asks(number):
            assert self.rule is not None and chunk.positions is not None
            here, earlier, positions = x.flatten(0, 1), chunk.x.flatten(0, 1), chunk.positions.flatten()
            of_tokens = None if source is None else source.repeat_interleave(x.shape[1], dim=0)
            at = AtExit(number, here, earlier, positions, lambda: logits.flatten(0, 1), of_tokens)
            leaves = self.rule(at).view(leaves.shape)
        return x, logits, leaves, tuple(after)

    def past(self, number: int, chunk: Chunk, state: tuple[State, ...], before: BeforeUse) -> tuple[State, ...]:
        """Return the states of the same uses after a chunk whose tokens have left before."""
        nothing = torch.ones(chunk.x.shape[0], 0, dtype=torch.bool, device=chunk.x.device)
        pairs = zip(self.leads(number), state, strict=True)
        return tuple(self._used(use, chunk._replace(x=before(chunk.x, use)), pair, nothing)[1] for use, pair in pairs)

    def _leave(self, number: int, x: Tensor, earlier: Tensor, running: _Running, read: ReadExit | None) -> None:
        """Let the tokens leave that do so by exit ``number``; ``read`` None: their exits were drawn."""
        if read is not None and self.asks(number) and running.some:
            assert self.rule is not None
            here = running.pick(x)
            at = AtExit(
                number,
                here,
                running.pick(earlier),
                running.pick(running.positions),
                lambda: read(here, number),
                None if running.source is None else running.pick(running.source),
            )
            running.put(self.rule(at))
        running.leave(number)


class Left(nn.Module):
    """A module called with the ``exits`` [batch, time] int64 by which the tokens of a
    chunk left, and ``valid``, for hooks."""

    def forward(self, exits: Tensor, valid: Tensor | None) -> None:
        return None


class _Running:
    """The tokens of a chunk that still run, ``mask`` [batch, time] bool, and by which exit each ``leaves_by``.

    ``output_mask``: where layers must give outputs, None for everywhere. ``some``: whether any token runs, as far as
    the host has read.
    """

    def __init__(self, chunk: Chunk, last: int, source: Tensor | None) -> None:
        x, valid = chunk.x, chunk.valid
        self.source = None if source is None else source[:, None].expand(-1, x.shape[1], -1)
        self.mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
        self.leaves_by = torch.full(x.shape[:2], last, dtype=torch.int64, device=x.device)
        positions = chunk.positions
        self.positions = torch.zeros_like(self.leaves_by) if positions is None else positions
        self.has_values = has_data(x) and not torch.compiler.is_compiling()
        self.whole, self.some = True, True
        self._picked = None if valid is None or not self.has_values else valid

    @property
    def output_mask(self) -> Tensor | None:
        return None if self.whole or not self.has_values else self.mask

    def merged(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y, a layer's output, for tokens that run, and x for the others."""
        if self.whole:
            return y
        return torch.where(self.mask[..., None], y, x.to(y.dtype)) if self.some else x

    def pick(self, per_token: Tensor) -> Tensor:
        """Return the running tokens [n, ...] of [batch, time, ...]; all where the host cannot read the mask."""
        return per_token.flatten(0, 1) if self._picked is None else per_token[self._picked]

    def put(self, leaves_by: Tensor) -> None:
        """Store the decision [n] about the tokens that :meth:`pick` returned."""
        if self._picked is not None:
            leaves_by = self.leaves_by.index_put((self._picked,), leaves_by)
        leaves_by = leaves_by.view(self.mask.shape)
        self.leaves_by = leaves_by if self._picked is not None else torch.where(self.mask, leaves_by, self.leaves_by)

    def leave(self, number: int) -> None:
        """Let the tokens leave that do so by exit ``number``."""
        if not self.some:
            return
        stay = self.leaves_by > number
        if self.has_values and bool(stay.all()):
            return
        self.mask = self.mask & stay
        self.whole, self._picked = False, self.mask if self.has_values else None
        self.some = not self.has_values or bool(self.mask.any())


PARTS = {
    "ExitStack": Exits.Config,
}
