"""What is each part of recent models worth, beside its plain twin at equal parameters and equal minutes?

    python benchmarks/modern_parts.py --data book.txt --minutes 5 --seeds 3 --runs FOLDER

The plain twin is `rope`; each other model differs from it in one part (--set), or is a member with another mixer. Steps
are what the minutes buy at the speeds that `kinformer compare` measures in turns, so that other work on the machine
slows the runs and changes no result. What FOLDER holds is not computed again.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, show

MIXER = "layers.*.mixer"
PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink_logit": {f"{MIXER}.score": "sink_logit"},
    "capped": {f"{MIXER}.score": "capped"},
    "head_gate": {f"{MIXER}.gate": "head"},
    "element_gate": {f"{MIXER}.gate": "element"},
    "qk_norm": {f"{MIXER}.projection": "normalised"},
    "exclusive": {f"{MIXER}.exclusive": "true"},
    "value_residual": {f"{MIXER}.value_residual": "true"},
    "swiglu": {"layers.*.feed_forward.kind": "swiglu"},
    "geglu": {"layers.*.feed_forward.kind": "geglu"},
    "parallel": {"layers.*.kind": "parallel"},
    "sandwich": {"layers.*.residual": "sandwich"},
    "sinks": {f"{MIXER}.pattern": "sinks", f"{MIXER}.pattern.window": 64},
}
"""Changes to `rope`, by name."""
MEMBERS: dict[str, dict[str, Any]] = {
    "local": {f"{MIXER}.pattern.window": 64},
    "differential": {},
    "mla": {},
    "mixtral": {"layers.*.feed_forward.num_experts": 4},
    "moba": {},
    "nsa": {},
    "gated-deltanet": {},
    "kda": {},
    "mamba2": {},
    "rwkv7": {},
}
"""Changes to members of their own."""
TRAINING = (
    "--sweep", 0, "--lr", 0.01, "--parameters", 800_000, "--train-tokenizer", 4096, "--ema", 0.07, "--batch-size", 2,
    "--length", 256, "--max-bytes", 100_000, "--contexts", "1x", "--lengths", "512", "--set", "layers=3",
)  # fmt: skip


def compared(options: Any, folder: Path) -> dict[str, Any]:
    """The report of ``kinformer compare`` on all of them."""
    words: list[Any] = [
        *(f"{name}=rope" for name in PARTS),
        *MEMBERS,
        "--data",
        options.data,
        "--out",
        folder,
        *TRAINING,
    ]
    for name, changes in (PARTS | MEMBERS).items():
        for path, value in changes.items():
            words += ["--set", f"{name}:{path}={value}"]
    budget = ("--steps", 3) if options.quick else ("--minutes", options.minutes)
    threads = ("--threads", options.threads) if options.threads else ()
    return kinformer("compare", *words, *budget, "--seeds", options.seeds, "--rounds", options.rounds or 3, *threads)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="a text file (the standard library's sources if not given)")
    parser.add_argument("--minutes", type=float, default=5.0, help="the budget of each run")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    parser.add_argument("--runs", type=Path, help="keep what is computed here")
    options = prepare(parser)
    with tempfile.TemporaryDirectory() as scratch:
        report = compared(options, options.runs or Path(scratch))
    rows, plain = [], None
    for entrant in report["entrants"]:
        bits = [run["value"] for run in entrant["runs"]]
        mean = statistics.mean(bits)
        plain = mean if plain is None else plain
        seconds = entrant["training"]["seconds"]
        rows.append(
            {
                "name": entrant["name"],
                "bits_per_byte": bits,
                "behind_plain": mean - plain,
                "steps": entrant["runs"][0]["steps"],
                "seconds_per_step": seconds,
                "parameters": entrant["parameters"],
            }
        )
    table = [
        [row["name"], statistics.mean(row["bits_per_byte"]), row["behind_plain"], row["steps"], row["parameters"]]
        for row in sorted(rows, key=lambda row: row["behind_plain"])
    ]
    show("bits per byte on held-out text", ("model", "mean", "beside plain", "steps", "parameters"), table)
    facts = {name: report[name] for name in ("data", "baselines", "budget", "settings")}
    save(options, "modern_parts", {"minutes": options.minutes, "seeds": options.seeds, "models": rows} | facts)


if __name__ == "__main__":
    main()
