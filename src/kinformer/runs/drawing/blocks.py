"""The blocks of keys that the queries of a trained run chose on a text, by layer and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn

from kinformer.core.model import StackedModel
from kinformer.figures.panels import MOST_CELLS, PatternPanel, numbered
from kinformer.mixers.chosen_blocks import ChosenBlocks
from kinformer.runs.drawing.options import DrawOptions
from kinformer.runs.drawing.text import MAX_TOKENS, TRACED, text_run, tokens_of
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

Choose: TypeAlias = Callable[..., tuple[Tensor | None, Tensor]]
BLOCKS = 32
"""Blocks of a text, where no length was asked."""


def chosen_panels(options: DrawOptions) -> tuple[list[PatternPanel], str]:
    """Return a panel for every layer and for all heads in it that choose together, of what they see of the first
    ``options.length`` tokens, without the branches that choose nothing; and a title."""
    run = text_run(options, "blocks")
    model = run.model(options.set).eval()
    mixers = _mixers(model, options, str(run.folder))
    block = max(mixer.config.block for mixer in mixers.values())
    length = options.length or min(MAX_TOKENS, max(TRACED, BLOCKS * block))
    tokens = torch.from_numpy(tokens_of(run, options, length)[:length])
    chosen, panels = _choices(model, mixers, tokens[None]), []
    for number, mixer in mixers.items():
        for heads, choice in _by_head(mixer, chosen[number][0], options):
            place = f"layer {number}, {numbered('head', heads)}"
            panels.append(_panel(mixer.config, choice, place))
    return panels, f"{run.folder.name} ({run.member}): blocks that {plural(len(tokens), 'token')} chose"


def _mixers(model: StackedModel, options: DrawOptions, folder: str) -> dict[int, ChosenBlocks]:
    """Return the mixers that choose blocks by the number of their layer: the one that was asked for, or all."""
    mixers = {
        number: module
        for number, layer in enumerate(model.stack.layers, start=1)
        for module in layer.modules()
        if isinstance(module, ChosenBlocks)
    }
    if not mixers:
        raise KinformerError(f"{folder}: no layer of this run chooses blocks; give a run of moba or nsa.")
    if options.layer is None:
        return mixers
    if options.layer not in mixers:
        raise KinformerError(
            f"`layer` {options.layer}: chooses no blocks; those that do are {', '.join(map(str, mixers))}."
        )
    return {options.layer: mixers[options.layer]}


def _choices(model: nn.Module, mixers: dict[int, ChosenBlocks], tokens: Tensor) -> dict[int, Tensor]:
    """Return what each mixer's queries chose, [1, choosers, time, count] as ``kernels.chosen.choose`` has it."""
    chosen: dict[int, Tensor] = {}
    with ExitStack() as stack, torch.inference_mode():
        for number, mixer in mixers.items():
            choose: Choose = mixer._choose

            def choose_and_record(
                *call: object, number: int = number, choose: Choose = choose
            ) -> tuple[Tensor | None, Tensor]:
                compressed, chosen[number] = choose(*call)
                return compressed, chosen[number]

            stack.enter_context(patch.object(mixer, "_choose", choose_and_record))
        model(tokens)
    return chosen


def _by_head(mixer: ChosenBlocks, chosen: Tensor, options: DrawOptions) -> Iterator[tuple[list[int], Tensor]]:
    """Yield heads (from 0) that choose together, and their choice [time, count]; of ``options.head`` alone if set."""
    together = mixer.config.num_heads // len(chosen)
    if options.head is not None and options.head > mixer.config.num_heads:
        raise KinformerError(f"`head` {options.head}: the layer has {plural(mixer.config.num_heads, 'head')}.")
    for index, choice in enumerate(chosen):
        heads = list(range(index * together, (index + 1) * together))
        if options.head is None or options.head - 1 in heads:
            yield heads, choice


def _panel(config: ChosenBlocks.Config, chosen: Tensor, place: str) -> PatternPanel:
    """Return the panel of a choice [time, count]: of every cell of queries and keys, the share of pairs seen."""
    time, size = len(chosen), config.block
    blocks = -(-time // size)
    per_cell = -(-blocks // MOST_CELLS)
    cells, index = -(-blocks // per_cell), torch.arange(time)
    seen = torch.zeros(cells * per_cell * size, cells * per_cell + 1, dtype=torch.float64)  # keys, by query and block
    seen[:time].scatter_(1, torch.where(chosen < 0, cells * per_cell, chosen), float(size))
    seen[index, index // size] = (index % size + 1).double()
    pairs = seen[:, :-1].view(cells, per_cell * size, cells, per_cell).sum((1, 3))
    always = [f"{getattr(config, name)} {name}" for name in ("first", "near") if getattr(config, name)]
    others = f"{' and '.join(always)} among them" if always else ""
    name = f"blocks of {size}: its own and {config.count - 1} others"
    return PatternPanel(
        place=place,
        name=f"{name}\n{others}" if others else name,
        shares=(pairs / (per_cell * size) ** 2).numpy(),
        tokens_per_cell=per_cell * size,
        causal=True,
        length=cells * per_cell * size,
        allowed_pairs=int(pairs.sum()),
    )
