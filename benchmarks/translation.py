"""What does an encoder-decoder learn of pairs of sentences, and what does beam search cost and gain?

Trains --member with --recipe on --data (or on number words) for --minutes, or --steps, and measures the test split
greedily and with a beam of 4: BLEU and chrF, by sacrebleu, beside the untranslated source. Whether the mean of the last
checkpoints was better than the best one is told by the run's metrics. Then one batch of sentences is translated in
turns, greedily and with the beam, and the median of the seconds is compared. A run folder --run that exists is gone on
with, or only measured where it has ended, so that the script may be stopped and started again. Options of `kinformer
train` stand after --:

    python benchmarks/translation.py --data multi30k/ --run runs/de --minutes 60 --threads 2 -- \
        --length 64 --batch-size 32 --optimizer muon --lr 5e-3 --train-tokenizer 4000
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import Contestant, arguments, interleave, kinformer, prepare, save, show, train
from kinformer.lab.runs.rows import data_of
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.evaluation import LoadedRun
from kinformer.lab.tasks.options import Decoding
from kinformer.lab.tasks.translate import Translator

BEAM, BATCH, ROUNDS = 4, 32, 5
TRAINED = ("steps", "parameters", "seconds", "tokens_per_second", "best_step")
MEASURED = ("bleu", "chrf", "bits_per_byte", "copy_bleu", "copy_chrf", "signatures", "pairs", "beam", "length_penalty")


def translator(options: Any, folder: Path) -> dict[str, Any]:
    """Train, or go on; what the command tells."""
    budget = ("--steps", options.steps) if options.steps else ("--minutes", options.minutes)
    data = ("--data", options.data) if options.data else ()
    asked = ("--task", "translate", "--recipe", options.recipe, "--seed", options.seed, *budget, *data)
    return train(options.member, folder, options.threads, *asked, *options.further)


def averaging(folder: Path) -> dict[str, float | None]:
    """Bits per byte of the best validation before the end, and of the mean of the last checkpoints."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {
        name: [line[f"{name}_bits_per_byte"] for line in lines if f"{name}_bits_per_byte" in line]
        for name in ("validation", "averaged")
    }
    return {name: min(values, default=None) for name, values in found.items()}


def costs(folder: Path, rounds: int, batch: int) -> dict[str, float]:
    """Median seconds of translating one batch of the test split, greedily and with the beam, in turns."""
    run = open_run(folder)
    texts = data_of(run).splits["test"].source[:batch]  # type: ignore[attr-defined]
    subject = LoadedRun(run, run.model())
    contestants = [
        Contestant(name, partial(Translator(subject, Decoding(beam=beam)), texts), fast=True)
        for name, beam in (("greedy", 1), ("beam", BEAM))
    ]
    interleave(contestants, rounds)
    return {each.name: each.median for each in contestants}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--member", default="vanilla")
    parser.add_argument("--recipe", default="pre-norm")
    parser.add_argument("--data", help="as of kinformer train --task translate; number words if not given")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="the run folder, which is kept and gone on with")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    rounds, first = options.rounds or ROUNDS, ()
    if options.quick:
        options.recipe, options.steps, rounds, first = "tiny", 4, 1, ("--first", 4)
        options.further = ["--length", "200", "--batch-size", "4", "--validation-tokens", "200", *options.further]
    threads = ("--threads", options.threads) if options.threads else ()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.run or Path(scratch) / "run"
        trained = translator(options, folder)
        found = {
            name: kinformer("evaluate", folder, "--beam", beam, *threads, *first)
            for name, beam in (("greedy", 1), ("beam", BEAM))
        }
        seconds = costs(folder, rounds, 4 if options.quick else BATCH)
        training = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]
        means = averaging(folder)
    rows = [[name, each["bleu"], each["chrf"], seconds[name]] for name, each in found.items()]
    rows.append(["source as it is", found["beam"]["copy_bleu"], found["beam"]["copy_chrf"], None])
    show(f"translation, {found['beam']['data']['name']}, test", ("", "BLEU", "chrF2", f"seconds of {BATCH}"), rows)
    result = {"member": options.member, "recipe": options.recipe, "data": found["beam"]["data"], "training": training}
    result |= {"trained": {name: trained[name] for name in TRAINED}, "validation_bits_per_byte": means}
    result |= {name: {key: each[key] for key in MEASURED} for name, each in found.items()}
    result |= {"seconds_of_a_batch": seconds, "sentences": BATCH, "examples": found["beam"]["examples"]}
    save(options, "translation", result)


if __name__ == "__main__":
    main()
