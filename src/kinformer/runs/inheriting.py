"""A run that begins with the weights of another: what it takes, what is new, what is left, and the lines about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.core.model import WholeModel
from kinformer.family.inherited_weights import Inheritance, inheritance
from kinformer.runs.run import Run, open_run
from kinformer.runtime.files import load_weights, require_weights
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.words import plural
from kinformer.training.best import best_weights

if TYPE_CHECKING:
    from torch import nn

_SHOWN = 6


def inherited_by(run: Run, base: Run) -> Inheritance:
    """What the model of ``run`` takes from that of ``base``; a head that predicts other things is new.

    Errors: ``KinformerError`` where nothing fits.
    """
    return inheritance(base.config, run.config, base.folder, head=_same_head(base, run))


def begin_with(model: nn.Module, run: Run, init: str) -> None:
    """Give ``model`` the weights that it takes from the run in the folder ``init``."""
    result = inherited_by(run, open_run(init))
    tensors, _ = best_weights(Path(init))
    require_weights(dict(result.base), {name: tensors[name] for name in tensors if name in result.base}, init)
    load_weights(model, result.weights(tensors, model.state_dict()), init)


def inheritance_text(data: JsonObject) -> str:
    """Return up to four lines about the run with whose weights a run of ``data`` begins; "" if there is none."""
    facts = data.get("inherited")
    if not facts:
        return ""
    every = facts["copied"] == facts["weights"] and facts["copied_numbers"] == facts["numbers"]
    share = "all" if every else f"{facts['copied']:,} of"
    lines = [
        f"begins with {data['init']} ({facts['member']}): {share} {plural(facts['weights'], 'weight')} copied "
        f"({facts['copied_numbers']:,} of {facts['numbers']:,} numbers)"
    ]
    for name, title in (("new", "new"), ("partly_new", "new in part"), ("left", "left behind")):
        if facts[name]:
            lines.append(f"  {title}: {_names(facts[name])}")
    return "\n".join(f"kinformer: {line}" for line in lines)


def _names(names: Sequence[str]) -> str:
    """The names, those of all layers as one, and how many there are beyond the first few."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"layers\.\d+", "layers.*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    shown = [f"{name} ({count} times)" if count > 1 else name for name, count in counts.items()]
    more = [f"{len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return ", ".join([*shown[:_SHOWN], *more])


def _same_head(base: Run, run: Run) -> bool:
    """Whether both predict the same things with the same head."""
    names = [(item.data.get("identity") or {}).get("classes") for item in (base, run)]
    heads = [getattr(item.config, "head", None) for item in (base, run)]
    return names[0] == names[1] and (heads[0] == heads[1] or run.config.protocol is not WholeModel)
