"""Multiple choice with five examples before every question: our model of lm-evaluation-harness beside its own.

    python benchmarks/harness.py            # about four minutes

A question is a passage of the standard library's text, its choices are what comes next and what comes next elsewhere,
and contexts are 43 times as long as a choice. Both models have the same weights: ``kinformer`` reads the run,
``hf`` (HFLM) what ``kinformer export`` makes of it, at several batch sizes. Nothing is timed unless accuracies are the
same and log-likelihoods equal. Seconds are those of the processor, over all threads, and do not count what else the
machine does; those of the clock stand beside them in the result.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kinformer
from common import Contestant, arguments, gate_equal, interleave, prepare, save, show, text_bytes
from kinformer.harness import KinformerLM

MEMBERS = ("linear-transformer", "rope")
DIM, LAYERS, LENGTH, STEPS, CONTEXT = 256, 4, 256, 30, 2048
SHOTS, CHOICES, QUESTION, CHOICE, ITEMS, BATCHES, TOLERANCE = 5, 4, 200, 32, 8, (1, 8), 1e-5
TASK = """task: continuations
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
num_fewshot: {shots}
metric_list: [{{metric: acc}}]
"""


def written_task(folder: Path) -> Path:
    """A task of passages of the standard library, each with what follows it and what follows three others."""
    draw, text = random.Random(0), bytes(text_bytes(None, 1 << 20).tolist()).decode("ascii", "replace")
    starts = draw.sample(range(len(text) - QUESTION - CHOICE), 400)
    follows = [text[start + QUESTION : start + QUESTION + CHOICE] for start in starts]
    lines = []
    for number, start in enumerate(starts):
        answer = draw.randrange(CHOICES)
        choices = draw.sample(follows[:number] + follows[number + 1 :], CHOICES - 1)
        choices.insert(answer, follows[number])
        lines.append(json.dumps({"question": text[start : start + QUESTION], "choices": choices, "answer": answer}))
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    settings = {"data": folder / "data.jsonl", "cache": folder / "cache", "shots": SHOTS}
    (folder / "task.yaml").write_text(TASK.format(**settings), encoding="utf-8")
    return folder / "task.yaml"


def done(lm: Any, task: Path, items: int) -> tuple[float, list[float], list[Any]]:
    """The accuracy of ``lm``, the log-likelihoods of all choices in order, and the requests."""
    loaded = TaskManager(include_defaults=False).load([str(task)])
    (instance,) = loaded["tasks"].values()
    instance.set_fewshot_seed(1234)
    results = evaluate(lm, loaded, limit=items, bootstrap_iters=0)
    assert results is not None
    samples = sorted(results["samples"]["continuations"], key=lambda sample: sample["doc_id"])
    values = [float(answer[0]) for sample in samples for (answer,) in sample["resps"]]
    return results["results"]["continuations"]["acc,none"], values, instance.instances


def raced(member: str, folder: Path, task: Path, items: int, rounds: int) -> dict[str, Any]:
    """Both models of one run in turns, behind the gate."""
    sizes = {"dim": DIM, "layers": LAYERS}
    run = folder / member
    kinformer.train(
        member, data="stdlib", out=run, steps=STEPS, length=LENGTH, batch_size=4, set=sizes, device="cpu", quiet=True
    )
    native = kinformer.export(run, folder / f"{member}-exported").native
    ours = KinformerLM(run, CONTEXT, device="cpu", quiet=True)
    theirs = [_hflm(folder / f"{member}-exported", ours.prefix_token_id, size) for size in BATCHES]
    accuracy, values, requests = done(ours, task, items)
    their_accuracy, their_values, _ = done(theirs[-1], task, items)
    if accuracy != their_accuracy:
        raise SystemExit(f"{member}: accuracy {accuracy} beside {their_accuracy}; not timed.")
    gap = gate_equal(member, torch.tensor(values), torch.tensor(their_values), TOLERANCE)
    lengths = [[len(text.encode()) for text in request.args] for request in requests]
    models = {"kinformer": ours} | {f"hf, batch size {size}": lm for size, lm in zip(BATCHES, theirs, strict=True)}
    spent: dict[str, list[float]] = {name: [] for name in models}
    contestants = [Contestant(name, partial(_scored, lm, requests, spent[name])) for name, lm in models.items()]
    interleave(contestants, rounds)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in spent.items()}  # the first round warms up
    ours_seconds, *their_seconds = medians.values()
    show(
        f"{member}: processor seconds for {len(requests)} choices, accuracy {accuracy:.3f}, gap {gap:.1e}",
        ["", "seconds", "of kinformer's"],
        [[name, seconds, seconds / ours_seconds] for name, seconds in medians.items()],
    )
    return {
        "native": native,
        "accuracy": accuracy,
        "largest_relative_gap": gap,
        "context_bytes": {"least": min(a for a, _ in lengths), "most": max(a for a, _ in lengths)},
        "processor_seconds": {name: seconds[1:] for name, seconds in spent.items()},
        "median_processor_seconds": medians,
        "clock_seconds": {item.name: item.seconds for item in contestants},
        "speedup_beside_the_fastest": min(their_seconds) / ours_seconds,
    }


def _scored(lm: Any, requests: list[Any], spent: list[float]) -> None:
    begun = time.process_time()
    lm.loglikelihood(requests, disable_tqdm=True)
    spent.append(time.process_time() - begun)


def _hflm(folder: Path, prefix: int, batch_size: int) -> HFLM:
    return HFLM(
        pretrained=str(folder), trust_remote_code=True, device="cpu", dtype="float32", max_length=CONTEXT,
        batch_size=batch_size, prefix_token_id=prefix,
    )  # fmt: skip


def main(members: Sequence[str] = MEMBERS) -> None:
    options = prepare(arguments(__doc__))
    items, rounds = (2, 1) if options.quick else (ITEMS, 3)
    result: dict[str, Any] = {
        "lm_eval": version("lm_eval"), "dim": DIM, "layers": LAYERS, "dtype": "float32", "steps": STEPS, "items": items,
        "choices": CHOICES, "shots": SHOTS, "question_bytes": QUESTION, "choice_bytes": CHOICE, "context": CONTEXT,
        "rounds": rounds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        task = written_task(Path(place))
        result["members"] = {member: raced(member, Path(place), task, items, rounds) for member in members}
    save(options, "harness", result)


if __name__ == "__main__":
    main()
