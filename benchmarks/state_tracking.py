"""Do negative eigenvalues, two steps a token and PaTH track states: parities, and permutations of three?

    python benchmarks/state_tracking.py            # about five minutes on two cores; may be stopped and continues

After every bit a model says whether the bits so far are odd in number; after every permutation of three things, which
of the six permutations all so far make. With beta in (0, 1) no state matrix of the delta rule has a negative
eigenvalue, and parity needs one (Grazzi et al. 2025); with beta in (0, 2) one step is a reflection, but a cycle of
three is a product of two (Siems et al. 2025, DeltaProduct). PaTH attention has the same matrices between a query and
its key (Yang et al. 2025). One layer of dim 32 (two heads of 16) and a feed-forward, Gated DeltaNet or softmax
attention, trained on texts of 16 tokens and tested on new ones of 16 and of 128, in the share of right tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common import RESULTS, arguments, prepare, save, show
from kinformer.blocks.residual import Initialisation
from kinformer.family.build import configure
from kinformer.models.decoder import Decoder

DIM, HEADS, TIME, LONG, ROWS, RATE = 32, 2, 16, 128, 32, 1e-2
VARIANTS: dict[str, dict[str, Any]] = {
    "beta in (0, 1)": {},
    "beta in (0, 2)": {"negative_eigenvalues": True},
    "beta in (0, 2), two steps": {"negative_eigenvalues": True, "steps": 2},
    "rope": {},
    "path": {},
}
"""Settings of Gated DeltaNet, or another member by its name."""
ORDERS = list(permutations(range(3)))
GROUPS = {
    "parity": torch.tensor([[0, 1], [1, 0]]),
    "permutations of three": torch.tensor(
        [[ORDERS.index(tuple(a[place] for place in b)) for b in ORDERS] for a in ORDERS]
    ),
}
"""The products of two elements; the first element is the neutral one."""
STEPS = {"parity": 600, "permutations of three": 3000}
SEEDS = {"parity": (0, 1, 2), "permutations of three": (0,)}


def texts(table: Tensor, rows: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random elements [rows, length], and the products of all up to each."""
    tokens = torch.randint(len(table), (rows, length), generator=draw)
    products = [tokens[:, 0]]
    for token in tokens.unbind(1)[1:]:
        products.append(table[products[-1], token])
    return tokens, torch.stack(products, 1)


def build(variant: str, symbols: int) -> Decoder:
    changes = {f"layers.*.mixer.{name}": value for name, value in VARIANTS[variant].items()}
    member = variant if variant in ("rope", "path") else "gated-deltanet"
    config = configure(member, "tiny", symbols, set={"layers.*.mixer.num_heads": HEADS, **changes})
    return config.replace(dim=DIM, layers=config.layers[:1], initialisation=Initialisation(scheme="framework")).build()


def right(model: Decoder, table: Tensor, length: int) -> float:
    tokens, labels = texts(table, 256, length, torch.Generator().manual_seed(10**6))
    with torch.inference_mode():
        return float((model(tokens)[0].argmax(-1) == labels).float().mean())


def train(group: str, variant: str, seed: int, steps: int) -> dict[str, Any]:
    table, begun = GROUPS[group], time.monotonic()
    torch.manual_seed(seed)
    model, draw = build(variant, len(table)), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        tokens, labels = texts(table, ROWS, TIME, draw)
        functional.cross_entropy(model.train()(tokens)[0].flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
    model.eval()
    accuracies = {str(length): right(model, table, length) for length in (TIME, LONG)}
    return {
        "group": group, "variant": variant, "seed": seed, "accuracy": accuracies,
        "parameters": sum(weight.numel() for weight in model.parameters()), "seconds": time.monotonic() - begun,
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this long")
    options = prepare(parser)
    steps, begun = dict.fromkeys(GROUPS, 10) if options.quick else STEPS, time.monotonic()
    settings = {"dim": DIM, "heads": HEADS, "length": TIME, "rows": ROWS, "rate": RATE, "steps": steps}
    path = options.out or RESULTS / "state_tracking.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and not options.quick else {}
    runs = known.get("runs", []) if known.get("settings") == settings else []
    for group in GROUPS:
        for seed in SEEDS[group][: 1 if options.quick else None]:
            for variant in VARIANTS:
                done = any((each["group"], each["variant"], each["seed"]) == (group, variant, seed) for each in runs)
                if done or time.monotonic() - begun > 60 * options.minutes:
                    continue
                runs.append(train(group, variant, seed, steps[group]))
                print(group, variant, seed, runs[-1]["accuracy"], f"{runs[-1]['seconds']:.0f} s", flush=True)
                save(options, "state_tracking", {"settings": settings, "runs": runs})
    rows = []
    for group in GROUPS:
        for variant in VARIANTS:
            chosen = [each["accuracy"] for each in runs if (each["group"], each["variant"]) == (group, variant)]
            if chosen:
                medians = [statistics.median(each[str(length)] for each in chosen) for length in (TIME, LONG)]
                rows.append([f"{group}, {variant}", *medians, len(chosen)])
    show("right tokens, medians over seeds", ("", f"{TIME} tokens", f"{LONG} tokens", "seeds"), rows)


if __name__ == "__main__":
    main()
