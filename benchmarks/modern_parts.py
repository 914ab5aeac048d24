"""What is each part of recent models worth, beside its plain twin at equal parameters and equal minutes?

    python benchmarks/modern_parts.py --data book.txt --minutes 5 --seeds 0 --threads 1 --out steps.json
    python benchmarks/modern_parts.py --data book.txt --add steps.json --seeds 3 --jobs 8

The plain twin is `rope`; each other model differs from it in one part (--set), or is a member with another mixer. Steps
are what the minutes buy at the speeds measured in turns, so that other work on the machine slows the runs and changes
no result. ``--add`` trains the seeds that a result file lacks, with its steps, which may be on a GPU.
"""

from __future__ import annotations

from typing import Any

from common import prepare
from equal_minutes import compare, parser

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
    "nsa_learnt": {f"{MIXER}.compression": "mlp"},
    "nsa_overlapping": {
        f"{MIXER}.compression": "mlp",
        f"{MIXER}.summary_length": 8,
        f"{MIXER}.summary_stride": 4,
    },
    "gated-deltanet": {},
    "kda": {},
    "mamba2": {},
    "rwkv7": {},
}
"""Changes to members of their own."""


def main() -> None:
    options = prepare(parser(__doc__, minutes=5.0))
    specs = [f"{name}=rope" for name in PARTS] + [
        f"{name}=nsa" if name.startswith("nsa_") else name for name in MEMBERS
    ]
    if options.members:
        specs = [spec for spec in specs if spec.partition("=")[0] in options.members]
    changes: dict[str, Any] = {"layers": 3}
    for name, parts in (PARTS | MEMBERS).items():
        if any(spec.partition("=")[0] == name for spec in specs):
            changes |= {f"{name}:{path}": value for path, value in parts.items()}
    compare("modern_parts", options, specs, changes)


if __name__ == "__main__":
    main()
