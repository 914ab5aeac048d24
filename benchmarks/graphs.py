"""Do exported graphs compute what the models compute, and how long does a token take them? Float32, one thread.

    generate     kinformer.generate (recorded steps)
    onnxruntime  the graph of `export --format onnx`, as docs/howto/onnxruntime.md runs it

Every causal member of tokens, recipe tiny, is exported as ONNX, or the reason why not is reported. The gate: logits of
a prompt of 31 tokens and of 69 single ones, of two sequences, equal the model's. Some members are also timed at
4 layers of dim 256. All take the most probable token. Exports are stored in --folder, so that measuring may wait for a
quiet machine: --make-only exports, and the next call measures.
"""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kinformer
from common import Contestant, arguments, gate_equal, interleave, prepare, save, show
from kinformer.core.model import CausalModel
from kinformer.family.build import configure
from kinformer.family.table import members
from kinformer.generation.recording import leaves_of
from kinformer.interop.graphs import ONNX_FILE, OnnxModel
from kinformer.lab.runs.exporting import export_graph
from kinformer.lab.runs.run import Run, save_weights
from kinformer.lab.tasks.table import task_of
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json, write_json

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {"tiny": ("tiny", {}), "4 x 256": ("benchmark", {})}
LARGER = ("gpt", "local", "linear-transformer", "gated-deltanet")
PROMPT, NEW = 64, 64
GATE = 1e-4


def run_of(member: str, shape: str, folder: Path) -> Run:
    """A run with random weights and bytes as tokens."""
    recipe, changes = SHAPES[shape]
    torch.manual_seed(0)
    config = configure(member, recipe, 256, changes)
    task = task_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, config.build().state_dict())
    data = {"spec": task.data.default, "holdout": None, "identity": {}}
    run = Run(
        folder=folder, member=member, recipe=recipe, config=config, task=task, options=task.Options(), data=data,
        training={},
    )  # fmt: skip
    run.save()
    return run


def make(member: str, shape: str, folder: Path) -> tuple[Run, Path, dict[str, Any]]:
    """The run, its export, and what is known of it: how long it took, or why it is none."""
    place = folder / shape.replace(" ", "") / member
    run, out, facts = run_of(member, shape, place / "run"), place / "onnx", place / "onnx.json"
    if not facts.exists():
        shutil.rmtree(out, ignore_errors=True)
        begun = time.perf_counter()
        try:
            export_graph(run, out, "onnx", lambda sentence: None)
            known: dict[str, Any] = {"seconds to make": time.perf_counter() - begun}
        except KinformerError as error:
            known = {"refused": str(error).removeprefix(f"{run.folder}: ")}
        write_json(facts, known)
    return run, out, read_json(facts)


@torch.no_grad()
def gate(member: str, model: Any, graph: OnnxModel) -> float:
    """The largest difference of logits over 100 tokens, of the largest logit."""
    tokens = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))
    held, state, ours, theirs = graph.begin(2), None, [], []
    for chunk in (tokens[:, :31], *tokens[:, 31:].split(1, dim=1)):
        logits, state = model(chunk, state)
        other, held = graph(chunk.numpy(), held)
        ours.append(logits)
        theirs.append(torch.from_numpy(other))
    return gate_equal(member, torch.cat(theirs, 1), torch.cat(ours, 1), GATE)


def by_onnxruntime(graph: OnnxModel, prompt: np.ndarray) -> list[int]:
    logits, state = graph(prompt, graph.begin(1))
    new = [int(logits[0, -1].argmax())]
    while len(new) < NEW:
        logits, state = graph(np.array([new[-1:]]), state)
        new.append(int(logits[0, -1].argmax()))
    return new


def by_generate(model: Any, prompt: torch.Tensor) -> list[int]:
    return kinformer.generate(model, prompt, max_new_tokens=NEW, temperature=0)[0].tolist()


def ways_of(member: str, shape: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What is reported of each way, and the functions that generate."""
    prompt = torch.randint(256, (1, PROMPT), generator=torch.Generator().manual_seed(2))
    run, out, known = make(member, shape, folder)
    model = run.model()
    rows: list[dict[str, Any]] = [{"way": "generate"}, {"way": "onnxruntime", **known}]
    ways: dict[str, Any] = {"generate": partial(by_generate, model, prompt)}
    if "refused" not in known:
        graph = OnnxModel(out / ONNX_FILE, leaves_of(model))
        rows[1]["gap"] = gate(member, model, graph)
        rows[1]["operators"] = operators(out / ONNX_FILE)
        ways["onnxruntime"] = partial(by_onnxruntime, graph, prompt.numpy())
    expected = by_generate(model, prompt)
    for way, generate in ways.items():
        assert generate() == expected, f"{member}, {shape}: {way} generates other tokens"
    return [{"member": member, "shape": shape} | row for row in rows], ways


def operators(path: Path) -> str:
    """Which of opset 27's operators stand in a file, and how often."""
    import onnx

    names = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    counts = {name: names.count(name) for name in ("LinearAttention", "CausalConvWithState")}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default="/tmp/kinformer-graphs")
    parser.add_argument("--make-only", action="store_true")
    options = prepare(parser)
    configs = [(one.name, configure(one.name, "tiny", None)) for one in members()]
    folder, rounds = Path(options.folder), options.rounds or (3 if options.quick else 7)
    tokens = [name for name, config in configs if config.protocol is CausalModel and config.input.kind == "tokens"]
    cases = [(name, "tiny") for name in tokens] + [(name, "4 x 256") for name in LARGER]
    rows: list[dict[str, Any]] = []
    for member, shape in cases:
        if options.make_only:
            print(member, shape, make(member, shape, folder)[2], flush=True)
            continue
        made, ways = ways_of(member, shape, folder)
        timed = [Contestant(way, generate) for way, generate in ways.items()]
        interleave(timed, rounds)
        found = {item.name: 1000 * item.median / NEW for item in timed}
        rows += [row | ({"ms a token": found[row["way"]]} if row["way"] in found else {}) for row in made]
    if options.make_only:
        return
    columns = ("member", "shape", "way", "seconds to make", "ms a token", "gap", "operators", "refused")
    show("exported graphs", columns, [[row.get(column) for column in columns] for row in rows])
    save(options, "graphs", {"prompt": PROMPT, "new": NEW, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
