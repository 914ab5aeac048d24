"""``kinformer embed DIR [FILE|FOLDER|-] --out FILE``: a vector for every text, image or sound."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kinformer.lab.cli.options import Changes, Inputs, Printing, RunFolder, options_as
from kinformer.lab.cli.predict import refuse_same, refuse_terminal
from kinformer.lab.runs.options import EmbedOptions


@dataclass(frozen=True, kw_only=True)
class Options(EmbedOptions, Printing):
    """Make a vector of every text, image or sound: the last hidden states of a trained run, their mean, the first or
    the last."""

    folder: RunFolder
    """The run folder."""
    inputs: Inputs = "-"
    """Texts: a file (lines, .tsv, .csv, .jsonl), a folder of them, or - for lines on standard input. Of a run of images
    or speech: a file, or a folder of them."""
    set: Changes = ()  # type: ignore[assignment]
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    out: str | None = None
    """Write the vectors to this file: .npz (the array `vectors` [items, dim]) or .jsonl (item and vector)."""
    json: bool = False
    """Print a JSON object for every item, one on a line, as without `out`."""


def run(options: Options) -> int:
    """Embed, and write every vector as it comes."""
    from kinformer.lab.runs.files import check_vectors, writing_vectors
    from kinformer.lab.runs.inference import embeddings

    refuse_terminal(options.inputs)
    if options.out is not None:
        check_vectors(options.out)
        refuse_same("out", options.out, options.inputs)
    vectors = embeddings(options.folder, options.inputs, options_as(EmbedOptions, options))
    if options.out is None:
        for kind, name, vector in vectors:
            print(json.dumps({kind: name, "vector": vector.tolist()}, ensure_ascii=False), flush=True)
        return 0
    with writing_vectors(options.out) as write:
        for embedded in vectors:
            write(embedded)
    return 0
