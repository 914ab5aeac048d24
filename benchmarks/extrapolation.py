"""Train short, read long: which encodings of positions hold beyond the length that they were trained at?

The same small decoder is trained with every encoding at one --length by `kinformer train`, and measured on the held-out
tenth by `kinformer evaluate` in non-overlapping windows of 1 to 64 times that length, and by position within them (as
in figure 4 of Press et al. 2022). Learned positions end where they were trained. Rotary positions are also read
interpolated and by YaRN, at every length with the factor that it takes. Run folders in --runs that exist already are
only measured; extra options of `kinformer train` stand after --:

    python benchmarks/extrapolation.py --data book.txt --steps 3000 --runs runs/extrapolation
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, arguments, kinformer, prepare, save, show, train
from kinformer.lab.drawing.plots import SERIES, Curve, Stroke, plot_lengths

MEMBER = "gpt"
NO_POSITION = {"position": "none"}
IN_ATTENTION = "layers.*.mixer.position"
TIMES = (1, 2, 4, 8, 16, 32, 64)
TRAINED = ("steps", "parameters", "seconds", "tokens_per_second", "best_step", "validation_bits_per_byte")
KEPT = ("context", "tokens", "bits_per_byte", "by_position")


@dataclass(frozen=True)
class Encoding:
    """``changes`` make the model of it, trained in the folder ``run``; ``scaling``: read with scaled angles."""

    name: str
    title: str
    changes: dict[str, Any]
    colour: str
    run: str
    scaling: str | None = None
    stroke: Stroke = "solid"

    def trained(self) -> list[str]:
        """--set options of `kinformer train`."""
        return [option for path, value in self.changes.items() for option in ("--set", f"{path}={value}")]

    def read(self, length: int, times: int) -> list[str]:
        """--set options of `kinformer evaluate` at ``times`` the training ``length``."""
        if self.scaling is None or times == 1:
            return []
        scaled = {"kind": "rope", "scaling": self.scaling, "factor": times}
        if self.scaling == "yarn":
            scaled["original_length"] = length
        return ["--set", f"{IN_ATTENTION}={json.dumps(scaled)}"]


def inside(kind: str) -> dict[str, Any]:
    """An encoding that acts inside attention, and nothing at the tokens."""
    return NO_POSITION | {IN_ATTENTION: kind}


def encodings(length: int) -> list[Encoding]:
    learned = {"position.max_length": length}
    sinusoidal = {"position": "sinusoidal", "input.scale": "true"}
    rope = inside("rope")
    return [
        Encoding("learned", "learned", learned, SERIES[6], "learned"),
        Encoding("sinusoidal", "sinusoidal", sinusoidal, SERIES[1], "sinusoidal"),
        Encoding("rope", "RoPE", rope, SERIES[2], "rope"),
        Encoding("rope-interpolated", "RoPE, interpolated", rope, SERIES[2], "rope", "linear", "dashed"),
        Encoding("rope-yarn", "RoPE, YaRN", rope, SERIES[2], "rope", "yarn", "dotted"),
        Encoding("t5", "T5", inside("t5"), SERIES[3], "t5"),
        Encoding("da", "distance-aware", inside("distance_aware"), SERIES[4], "da"),
        Encoding("xl", "Transformer-XL", inside("xl"), SERIES[5], "xl"),
        Encoding("alibi", "ALiBi", inside("alibi"), SERIES[0], "alibi"),
    ]


def trained(encoding: Encoding, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train the model of an encoding in its folder of ``folder``, or go on with what is there."""
    budget = ("--steps", options.steps, "--length", options.length, "--seed", options.seed)
    data = ("--data", options.data, "--holdout", 0.1)
    words = (*data, *budget, *encoding.trained(), *options.further)
    return train(MEMBER, folder / encoding.run, options.threads, *words)


def measure(encoding: Encoding, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Bits per byte in windows of every length, and by position within them."""
    common = ("--max-bytes", options.bytes, *(("--threads", options.threads) if options.threads else ()))
    if encoding.scaling is None:
        lengths = ",".join(f"{times}x" for times in options.times)
        told = kinformer("evaluate", folder, "--context", options.length, "--lengths", lengths, *common)
        found = told["lengths"]
    else:
        found = []
        for times in options.times:
            windows = ("--context", times * options.length)
            told = kinformer("evaluate", folder, *windows, *encoding.read(options.length, times), *common)
            found.append(told)
    return {"data": told["data"], "lengths": [{name: each[name] for name in KEPT} for each in found]}


def curve(encoding: Encoding, length: int, lengths: Sequence[dict[str, Any]]) -> Curve:
    return Curve(
        name=encoding.title,
        trained=length,
        lengths=tuple((each["context"], each["bits_per_byte"]) for each in lengths),
        positions=tuple((place["last"], place["bits_per_byte"]) for place in lengths[-1]["by_position"]),
        colour=encoding.colour,
        stroke=encoding.stroke,
    )


def tables(found: dict[str, dict[str, Any]]) -> None:
    """Bits per byte by context length, and by position in the longest windows."""
    contexts = sorted({each["context"] for one in found.values() for each in one["lengths"]})
    rows = []
    for name, one in found.items():
        bits = {each["context"]: each["bits_per_byte"] for each in one["lengths"]}
        rows.append([name, *(bits.get(context) for context in contexts)])
    show("bits per byte in windows of so many tokens", ("encoding", *map(str, contexts)), rows)
    places = sorted({each["last"] for one in found.values() for each in one["lengths"][-1]["by_position"]})
    rows = []
    for name, one in found.items():
        bits = {each["last"]: each["bits_per_byte"] for each in one["lengths"][-1]["by_position"]}
        rows.append([name, *(bits.get(place) for place in places)])
    show(
        "bits per byte by position, the last of each bin, in the longest windows", ("encoding", *map(str, places)), rows
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="a text file (the standard library's sources if not given)")
    parser.add_argument("--encodings", nargs="+", help="only these (all if not given)")
    parser.add_argument("--length", type=int, default=128, help="tokens at which all are trained")
    parser.add_argument("--times", type=int, nargs="+", default=list(TIMES), help="multiples that are measured")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=1 << 17, help="of the held-out text, the same at every length")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    if options.quick:
        options.steps, options.length, options.times, options.bytes = 10, 32, [1, 2, 4], 2000
        options.further = ["--recipe", "tiny", *options.further]
    every = encodings(options.length)
    chosen = [each for each in every if options.encodings is None or each.name in options.encodings]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        settings_of = {
            each.name: {name: value for name, value in trained(each, folder, options).items() if name in TRAINED}
            for each in chosen
        }
        found = {each.name: measure(each, folder / each.run, options) for each in chosen}
    tables(found)
    settings = {name: getattr(options, name) for name in ("length", "times", "steps", "seed", "bytes", "further")}
    save(options, "extrapolation", {"settings": settings, "trained": settings_of, "measured": found})
    picture = options.out or (None if options.quick else RESULTS / "extrapolation.json")
    if picture is not None:
        plot_lengths(
            [curve(each, options.length, found[each.name]["lengths"]) for each in chosen], picture.with_suffix(".png")
        )
        print(f"wrote {picture.with_suffix('.png')}")


if __name__ == "__main__":
    main()
