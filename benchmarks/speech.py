"""Speech by linear, softmax and hashed attention and by an LSTM in both directions: errors, and seconds per epoch.

Every member is trained from scratch on the clips in --data (telephone tones if none are given) by the same recipe and
number of steps, and measured on the test split: the error rate, greedy. --runs keeps the run folders; there a run that
was stopped goes on, and one that has ended is only measured. Beside it, a training step of each at rows of --frames
frames (a fourth as many positions), taken in turns, as seconds for --epoch rows and as ratios to softmax, which is also
timed by PyTorch's own attention.
--only errors or --only times does one of them. Extra options of `kinformer train` stand after --:

    python benchmarks/speech.py --data clips/ --runs runs/speech -- --join 3-7 --test-clips '*_[0-4].wav'
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from common import Contestant, arguments, gate_learning, interleave, kinformer, prepare, save, show
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure
from kinformer.lab.tasks.speech import CTC, SpeechBatch

MEMBERS = ("speech-softmax", "speech-linear", "speech-lsh", "speech-lstm")
FUSED = "speech-softmax by PyTorch's attention"
TRAINED = ("steps", "parameters", "seconds", "best_step")
MEASURED = ("error_rate", "substitutions", "deletions", "insertions", "symbols", "utterances", "right", "baselines")


def errors(member: str, folder: Path, options: Any) -> dict[str, Any]:
    """Train ``member`` in ``folder``, or go on there, and measure it."""
    threads = ("--threads", options.threads) if options.threads else ()
    recipe = ("--recipe", options.recipe, "--batch-size", options.batch_size, "--length", options.length)
    data = () if options.data is None else ("--data", options.data)
    new = (*data, *recipe, "--lr", options.lr, *options.further)
    resumed = (folder / "config.json").exists()
    more = ("--resume",) if resumed else new
    trained = kinformer("train", member, "--out", folder, "--steps", options.steps, *more, *threads)
    measured = kinformer("evaluate", folder, *threads)
    found = {"member": member} | {name: trained[name] for name in TRAINED} | {name: measured[name] for name in MEASURED}
    print(f"{member}: error rate {found['error_rate']:.2%} after {found['steps']} steps", flush=True)
    return found


def stepper(config: ModelConfig, frames: int, rows: int) -> Any:
    """A training step of ``config`` on ``rows`` utterances of so many frames, which returns the loss."""
    torch.manual_seed(0)
    model, objective = config.build().train(), CTC()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    positions = max(1, frames // config.input.stride)
    values = torch.randn(model.input.example(rows, positions).shape)
    symbols = max(1, positions // 10)
    targets = torch.randint(1, config.head.classes, (rows, symbols))
    batch = SpeechBatch(values, torch.ones(rows, positions, dtype=torch.bool), targets, torch.full((rows,), symbols))

    def step() -> float:
        optimiser.zero_grad()
        loss = objective(model, batch, None, 0.0)[0]
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def times(frames: int, options: Any) -> dict[str, Any]:
    """Seconds of a training step of every member, of as many frames in all whatever their number in a row."""
    rows = max(1, options.step_frames // frames)
    contestants = []
    configs = {member: configure(member, options.recipe) for member in options.members}
    if "speech-softmax" in configs:
        configs[FUSED] = configure("speech-softmax", options.recipe, set={"layers.*.mixer.impl": "sdpa"})
    for name, config in configs.items():
        step = stepper(config, frames, rows)
        gate_learning(name, [step() for _ in range(4)])
        contestants.append(Contestant(name, step, fast=True))
    interleave(contestants, options.rounds)
    epoch = options.epoch / rows
    found = {each.name: {"step": each.median, "epoch": each.median * epoch} for each in contestants}
    base = found.get("speech-softmax", {"step": None})["step"]
    for each in found.values():
        each["speed"] = None if base is None else base / each["step"]
    return {"frames": frames, "rows": rows, "members": found}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--members", nargs="*", default=list(MEMBERS))
    parser.add_argument("--data", help="a folder of clips or a table of them")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--frames", type=int, nargs="*", default=[100, 1000, 2400], help="of a row that is timed")
    parser.add_argument("--epoch", type=int, default=2700, help="rows of an epoch")
    parser.add_argument("--name", default="speech", help="of the result file")
    parser.add_argument("--only", choices=("errors", "times"))
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    options.batch_size, options.length, options.rounds = 16, 256, options.rounds or 9
    options.step_frames = 16_000
    if options.quick:
        options.recipe, options.steps, options.batch_size, options.rounds = "tiny", 4, 4, 2
        options.frames, options.step_frames = [100], 400
    result: dict[str, Any] = {"recipe": options.recipe, "further": options.further}
    if options.only != "times":
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.runs or Path(scratch)
            result["errors"] = [errors(member, folder / member, options) for member in options.members]
        rows = [[e["member"], e["error_rate"], e["right"], e["parameters"], e["steps"]] for e in result["errors"]]
        show("speech, test split", ("member", "error rate", "without error", "parameters", "steps"), rows)
    if options.only != "errors":
        result["times"] = [times(frames, options) for frames in options.frames]
        for each in result["times"]:
            rows = [[name, m["step"], m["epoch"], m["speed"]] for name, m in each["members"].items()]
            title = f"training, {each['rows']} rows of {each['frames']} frames"
            show(title, ("member", "s a step", "s an epoch", "x softmax"), rows)
    save(options, options.name, result)


if __name__ == "__main__":
    main()
