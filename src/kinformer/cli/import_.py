"""``kinformer import FOLDER --out DIR``: a Hugging Face checkpoint folder becomes a run folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from kinformer.cli.options import Common
from kinformer.cli.output import print_json
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.interop import Imported

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Turn a Hugging Face checkpoint folder (config.json, safetensors) into a run folder.

    What can be imported: GPT-2, BERT, RoBERTa, Longformer and Big Bird.
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The checkpoint folder."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """The run folder, which must be new or empty."""
    name: str = "imported"
    """What the run calls its recipe."""


def run(options: Options) -> int:
    """Read, check and write; returns the exit status."""
    from kinformer.interop import read_checkpoint

    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise KinformerError(f"--out {out}: is not empty; give a new folder.")
    imported = read_checkpoint(options.folder)
    parameters = _checked(imported, options.folder)
    _write(imported, options, out)
    for note in imported.notes:
        print(f"kinformer: {options.folder}: {note}.", file=sys.stderr)
    if imported.tokenizer is None:
        calls = "kinformer.load" if imported.model["kind"] == "encoder" else "kinformer.load and kinformer.generate"
        print(
            f"kinformer: {options.folder} has no {TOKENIZER}, so the run takes token ids only ({calls}); put the "
            f"model's {TOKENIZER} into {out} to work with text.",
            file=sys.stderr,
        )
    if options.json:
        facts = {"out": str(out), "member": imported.member, "recipe": options.name, "parameters": parameters}
        print_json(facts | {"tokenizer": imported.tokenizer is not None})
    else:
        print(f"{out}: {imported.member} ({options.name}), {parameters:,} parameters")
    return 0


def _checked(imported: Imported, place: str) -> int:
    """The number of parameters, after making sure that config and weights belong together; allocates nothing."""
    import torch

    from kinformer.core.files import load_weights
    from kinformer.family.build import model_config

    with torch.device("meta"):
        model = model_config(imported.model, f"{place}: model").build()
    load_weights(model, {name: weight.to("meta") for name, weight in imported.weights.items()}, place)
    return sum(parameter.numel() for parameter in model.parameters())


def _write(imported: Imported, options: Options, out: Path) -> None:
    from kinformer.core.config import to_dict
    from kinformer.core.files import read_json, write_atomic
    from kinformer.data.corpus import STDLIB
    from kinformer.family.build import model_config
    from kinformer.family.runs import Run, save_weights

    if imported.tokenizer is not None:
        read_json(imported.tokenizer)
        write_atomic(out / TOKENIZER, partial(_copy, imported.tokenizer))
    save_weights(out, imported.weights, {"imported": "1"})
    Run(
        folder=out,
        member=imported.member,
        recipe=options.name,
        model=to_dict(model_config(imported.model)),
        tokenizer=TOKENIZER,
        data={"spec": STDLIB, "holdout": None, "identity": {}},
        training={},
    ).save()


def _copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())
