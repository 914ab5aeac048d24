"""Early exits: a token leaves after some layers, as a rule decides from its past (Elbayad et al. 2020, section 3;
Schuster et al. 2022, section 3).

Let h^l be the output of layer l. The next token of a token that leaves after layer l is predicted from h^l. Every later
layer absorbs h^l in place of its input and projects h^l to keys and values, so that later tokens can attend to it (the
papers call this a copied state, or state propagation). Without a rule, and in aligned training, all tokens go through
all layers: the stack then equals the sequential stack.

With the layer ``decoder`` and softmax attention, a later layer computes only the key and the value of a token after its
exit. Other mixers run in full, and then only running tokens enter the feed-forward. Other layers run in full. While a
graph is captured, and where tensors are shapes alone, all tokens go through all layers, with equal results: estimated
costs are costs without early exits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kinformer.adaptive.rules import AllExits, AtExit, ExitRule, ExitRuleConfig
from kinformer.core.contract import Chunk
from kinformer.core.encoder import checked_source
from kinformer.core.model import Hidden, SourceModel
from kinformer.core.stack import BeforeUse, Stack, StackConfig
from kinformer.core.state import State
from kinformer.models.decoder import Decoder, DecoderState
from kinformer.models.encoder import EncoderDecoder
from kinformer.runtime.compiling import has_data
from kinformer.runtime.errors import KinformerError, plural

M = TypeVar("M", bound=nn.Module)

ReadExit = Callable[[Tensor, int], Tensor]
"""(x [..., dim], outputs of the layer before an exit, number of the exit) -> the exit's logits [..., vocab]."""

WEIGHTS: dict[str, Callable[[int], list[float]]] = {
    "linear": lambda exits: [1.0 + number for number in range(exits)],
    "uniform": lambda exits: [1.0] * exits,
    "powers": lambda exits: [2.0**number for number in range(exits)],
}
"""The weights of the losses of all exits in aligned training, by name."""


class ExitStack(Stack):
    """The layers in order, with exits ``after`` some layers, counted from 1 (None: after every layer), and after the
    last.

    ``rule`` None lets no token leave early. ``classifiers``: ``tied``, one head for all exits, or ``separate``, one
    head for each exit. ``training``: ``aligned``, all tokens go through all layers and the objective reads every exit,
    or ``mixed``, each token leaves by an exit drawn evenly, ``samples`` times in a step. ``weights`` are the weights of
    the losses of exits 1, 2, ... in aligned training: their numbers (``linear``), equal (``uniform``), or powers of 2.
    """

    adaptive = True

    class Config(StackConfig):
        kind = "exits"
        LEAST = {"samples": 1}
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
            """Return the numbers of the layers before exits, counted from 0, the last layer included."""
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

        def model_class(self, plain: type[M]) -> type[M]:
            classes: tuple[type, ...] = (ExitDecoder, ExitEncoderDecoder)
            return next(item for item in classes if issubclass(item, plain))

        def build_model(self, layers: Sequence[nn.Module], dim: int) -> ExitStack:
            return ExitStack(self, layers, dim)

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
        # Measurements replace the rule for a while, but the states still hold the source that this rule reads.
        self.reads_source = self.rule is not None and self.rule.reads_source
        self.left = Left()

    @property
    def learns(self) -> bool:
        """Return whether there are weights that only the losses of all exits train: of the rule, or of heads."""
        config = self.config
        owns = config.classifiers == "separate" or (config.rule is not None and config.rule.learns)
        return owns and config.training == "aligned"

    @property
    def leaves_early(self) -> bool:
        """Return whether tokens may leave by an exit before the last, outside of training."""
        return self.rule is not None and not self.rule.off

    def aligned_loss(self, losses: Sequence[Tensor], seen: AllExits | None, progress: float) -> Tensor:
        """Return the loss of a step of aligned training: the weighted mean of the exits' ``losses``, scalars, and the
        loss by which the rule learns from the outputs ``seen``, None without a rule.

            sum of w_n L_n over the exits n / sum of w_n                         (Elbayad et al. 2020, section 3.1)

        ``progress`` is the completed share of training.
        """
        weights = WEIGHTS[self.config.weights](len(losses))
        loss = torch.stack([weight * item for weight, item in zip(weights, losses, strict=True)]).sum() / sum(weights)
        if seen is None:
            return loss
        assert self.rule is not None
        cost = self.rule.cost(seen, progress)
        return loss if cost is None else loss + cost

    def absorb_by_exits(
        self,
        chunk: Chunk,
        state: tuple[State, ...],
        before: BeforeUse,
        taps: Sequence[int],
        read: ReadExit,
        source: Tensor | None = None,
    ) -> tuple[tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]], Tensor | None]:
        """Absorb ``chunk`` as :meth:`absorb` does, but let tokens leave early; also return the exit of each token,
        [batch, time] int64, None where all tokens go through all layers.

        Rules decide by the logits that ``read`` returns, or by ``source`` [batch, dim], the mean of each row's source.
        """
        drawn = self.training and self.config.training == "mixed"
        if not drawn and (self.training or not self.leaves_early):
            return self.absorb(chunk, state, before, taps), None
        running = _Running(chunk, len(self.exits) - 1, source)
        if drawn:
            running.leaves_by = torch.randint_like(running.leaves_by, len(self.exits))
        x = earlier = chunk.x
        after, tapped = [], []
        for number in range(len(self.order)):
            inputs = chunk._replace(x=before(x, number))
            y, new_state = self._run_use(number, inputs, state[number], running.output_mask)
            x = running.merge(x, y)
            after.append(new_state)
            if number in taps:
                tapped.append(x)
            if number in self.exits[:-1]:
                self._leave(self.exits.index(number), x, earlier, running, None if drawn else read)
                earlier = x
        self.left(running.leaves_by, chunk.valid)
        return (x, tuple(after), tuple(tapped)), running.leaves_by

    def _leave(self, number: int, x: Tensor, earlier: Tensor, running: _Running, read: ReadExit | None) -> None:
        """Let tokens leave by exit ``number``, as the rule decides; ``read`` None: their exits were drawn."""
        if read is not None and self.rule is not None and self.rule.asks(number) and running.some:
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
    """A module without effect, for hooks: called with the ``exits`` [batch, time] int64 of a chunk, and ``valid``."""

    def forward(self, exits: Tensor, valid: Tensor | None) -> None:
        return None


class _Running:
    """The tokens of a chunk that still run, ``mask`` [batch, time] bool, and the exit of each token, ``leaves_by``
    [batch, time] int64.

    ``output_mask`` are the tokens whose outputs layers must compute, None for all. ``some``: whether any token runs, as
    far as the host has read.
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

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the outputs y of a layer for running tokens, and its inputs x for the others."""
        if self.whole:
            return y
        return torch.where(self.mask[..., None], y, x.to(y.dtype)) if self.some else x

    def pick(self, per_token: Tensor) -> Tensor:
        """Return the running tokens [n, ...] of [batch, time, ...], or all tokens if the host cannot read the mask."""
        return per_token.flatten(0, 1) if self._picked is None else per_token[self._picked]

    def put(self, leaves_by: Tensor) -> None:
        """Store the exits [n] of the tokens that :meth:`pick` returned."""
        if self._picked is not None:
            leaves_by = self.leaves_by.index_put((self._picked,), leaves_by)
        leaves_by = leaves_by.view(self.mask.shape)
        self.leaves_by = leaves_by if self._picked is not None else torch.where(self.mask, leaves_by, self.leaves_by)

    def leave(self, number: int) -> None:
        """Stop the tokens whose exit is ``number``."""
        if not self.some:
            return
        stay = self.leaves_by > number
        if self.has_values and bool(stay.all()):
            return
        self.mask = self.mask & stay
        self.whole, self._picked = False, self.mask if self.has_values else None
        self.some = not self.has_values or bool(self.mask.any())


# Decoders whose tokens may leave early, built from a decoder's config with a stack of exits.


class SourceMean(NamedTuple):
    """The mean vector of each row's source, ``mean`` [batch, dim]; n neighbouring rows of a chunk may share one vector,
    as the hypotheses of a beam do."""

    mean: Tensor

    outlives_reset = True  # type: ignore[misc]


class ExitInputs(NamedTuple):
    """The inputs of separate heads: ``hidden_states`` [batch, time, dim], and ``by`` [batch, time] int64, the exits."""

    hidden_states: Tensor
    by: Tensor


class ExitDecoder(Decoder):
    """A decoder whose tokens may leave for the head by an exit before the last layer.

    With ``classifiers = "separate"`` of the stack's config, ``exit_heads`` are the heads of all exits but the last,
    whose head is the model's; otherwise all exits share the model's head.
    """

    stack: ExitStack

    def __init__(self, config: Decoder.Config) -> None:
        super().__init__(config)
        rule = self.stack.rule
        if rule is not None and rule.reads_source and config.protocol is not SourceModel:
            kind = self.stack.config.rule.kind  # type: ignore[union-attr]
            raise KinformerError(
                f"the stack's rule {kind!r} reads the source of a translation, but this model has none; use it in an "
                "encoder-decoder (vanilla), or another rule (multinomial, geometric)."
            )

    def _build_head(self) -> None:
        super()._build_head()
        self.exit_heads: nn.ModuleList | None = None
        if self.stack.config.classifiers == "tied" or len(self.stack.exits) == 1:
            return
        config = self.config
        heads = (config.head.build(config.width, self.input) for _ in self.stack.exits[:-1])
        self.exit_heads = nn.ModuleList(heads)
        if not any(parameter.dim() > 1 for parameter in self.exit_heads.parameters()):
            raise KinformerError(
                f"the head {config.head.kind!r} is tied to the table of the input, so exits cannot "
                "have separate matrices; give `set` head.tied=false, or `set` stack.classifiers=tied."
            )

    def exit_logits(self, x: Tensor, number: int) -> Tensor:
        """Return the logits [..., vocab] of exit ``number``, from 0 on, for the outputs x [..., dim] of its layer."""
        return self._head_of(number)(self.norm(x), self.input)

    def _head_of(self, exit: int) -> nn.Module:
        return self.head if self.exit_heads is None or exit >= len(self.exit_heads) else self.exit_heads[exit]

    def logits(self, inputs: Tensor | ExitInputs) -> Tensor:
        if isinstance(inputs, Tensor):
            return self.head(inputs, self.input)
        x, by = inputs
        if by.is_meta:
            # Costs are counted as if no token left early.
            return self.head(x, self.input)
        if torch.compiler.is_compiling() or not has_data(by):
            every = torch.stack([self._head_of(exit)(x, self.input) for exit in range(len(self.stack.exits))], dim=-2)
            return every.gather(-2, by[..., None, None].expand(*by.shape, 1, every.shape[-1]))[..., 0, :]
        exits: list[int] = torch.unique(by).tolist()
        if len(exits) == 1:
            return self._head_of(exits[0])(x, self.input)
        logits = None
        for number in exits:
            head_logits = self._head_of(number)(x[by == number][None], self.input)[0]
            logits = head_logits.new_empty(*by.shape, head_logits.shape[-1]) if logits is None else logits
            logits = logits.index_put((by == number,), head_logits)
        assert logits is not None
        return logits

    def head_inputs(
        self,
        values: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor | ExitInputs, DecoderState]:
        """Return the last hidden states [batch, time, dim] or :class:`ExitInputs`, and the state after the chunk."""
        if self.exit_heads is None:
            return super().head_inputs(values, state, valid=valid, reset=reset)
        chunk, state, order = self._begin(values, state, valid, reset)
        (x, state, _), by = self._absorb_by_exits(chunk, state, ())
        if order is not None:
            x, by = order.restore(x), None if by is None else order.restore(by)
        return x if by is None else ExitInputs(x, by), state

    def _absorb(self, chunk: Chunk, state: DecoderState, taps: Sequence[int]) -> Hidden:
        return self._absorb_by_exits(chunk, state, taps)[0]

    def _absorb_by_exits(self, chunk: Chunk, state: DecoderState, taps: Sequence[int]) -> tuple[Hidden, Tensor | None]:
        """Absorb ``chunk`` of values; also return the exits [batch, time] int64, None where no token leaves early."""
        chunk, before, seen = self._place(chunk, state.seen)
        source = source_means(state, chunk.x.shape[0])
        (x, layers, tapped), by = self.stack.absorb_by_exits(
            chunk, state.layers, before, taps, self.exit_logits, source
        )
        # Not ``state._replace``: PyTorch 2.11 cannot return a NamedTuple from a graph that met its class as an input's.
        return Hidden(self.norm(x), DecoderState(layers, seen, state.source), tapped), by


class ExitEncoderDecoder(ExitDecoder, EncoderDecoder):
    """An encoder-decoder whose decoder has early exits; a rule may read the mean of the encoded source."""

    def initial_state(self, batch: int, *, source: Tensor | None = None, **options: Any) -> DecoderState:
        """Return the state of ``batch`` new sequences over an encoded ``source`` [batch, length, width]."""
        state = super().initial_state(batch, source=source, **options)
        if source is None or not self.stack.reads_source:
            return state
        source, valid = checked_source(source, options.get("source_valid"), batch, source.shape[-1])
        mean = source.sum(1) / valid.sum(1, keepdim=True).clamp_min(1)
        return state._replace(source=SourceMean(mean.to(state.seen.device)))  # type: ignore[call-arg]


def source_means(state: DecoderState, rows: int) -> Tensor | None:
    """Return the mean of each row's source, [rows, dim]; None where the stack reads no source."""
    if not isinstance(state.source, SourceMean):
        return None
    mean = state.source.mean
    count = mean.shape[0]
    return mean if count == rows else mean.repeat_interleave(rows // count, dim=0)


PARTS = {"ExitStack": ExitStack.Config}
