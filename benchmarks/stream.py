"""A million tokens through one state: does anything grow, and is it still right at the end?

Most tokens are absorbed in chunks, the last ones are generated one by one (sampled, so that the text goes on). Watched
are the bytes of the state and the resident memory of the process: its peak in the second half is held against that in
the first, after a twentieth of the tokens to warm up, since allocators take and give back all the time. At the end the
state is compared with that of the same model in float64 that absorbed the same tokens. Members: linear-transformer,
fast-weights, and gpt with a window of 256 and rotary positions.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import kinformer
from common import arguments, memory, prepare, save, show, text_bytes
from kinformer.core.state import nbytes, tensors, value

Watch = list[dict[str, int]]

CHUNK, GROWTH, ERROR = 4096, 10 * 2**20, 1e-3
MEMBERS: dict[str, dict[str, Any]] = {
    "linear-transformer": {},
    "fast-weights": {},
    "gpt": {
        "position": "none",
        "layers.*.mixer.position": "rope",
        "layers.*.mixer.pattern": {"kind": "local", "window": 256},
    },
}


def absorb(model: nn.Module, tokens: Tensor, state: Any, watch: Watch | None = None) -> tuple[Tensor, Any]:
    """The last token's logits [vocab] and the state after ``tokens`` [time], taken in chunks."""
    hidden = None
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        hidden, state, _ = model.hidden(part[None], state)
        if watch is not None:
            watch.append(seen(state, start + len(part)))
    return model.logits(hidden[:, -1:])[0, 0], state


def generate(model: nn.Module, tokens: Tensor, start: int, logits: Tensor, state: Any, watch: Watch) -> Any:
    """Fill ``tokens`` from ``start`` on with samples, absorbing each; returns the state after the last."""
    generator = torch.Generator().manual_seed(0)
    for index in range(start, len(tokens)):
        tokens[index] = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        hidden, state, _ = model.hidden(tokens[None, index : index + 1], state)
        logits = model.logits(hidden)[0, 0]
        if (index - start) % 500 == 0 or index + 1 == len(tokens):
            watch.append(seen(state, index + 1))
    return state


def seen(state: Any, tokens: int) -> dict[str, int]:
    """How large things are: the state as a value, its buffers (with room for the next chunk), the whole process."""
    return {
        "tokens": tokens,
        "state_bytes": nbytes(value(state)),
        "buffer_bytes": nbytes(state),
        "resident_bytes": memory("VmRSS"),
    }


def relative_error(state: Any, truth: Any) -> float:
    """Of the worst tensor: the largest difference over the largest value (counters must be equal)."""
    worst = 0.0
    for ours, exact in zip(tensors(value(state)), tensors(value(truth)), strict=True):
        if ours.shape != exact.shape:
            raise SystemExit(f"the state has shapes {tuple(ours.shape)} and {tuple(exact.shape)} at the end.")
        gap = (ours.double() - exact.double()).abs().max() / exact.double().abs().max().clamp_min(1e-300)
        worst = max(worst, float(gap))
    return worst


def run(member: str, recipe: str, tokens: Tensor, generated: int) -> dict[str, Any]:
    """Stream ``tokens`` (the last ``generated`` of which are overwritten) through ``member``."""
    torch.manual_seed(0)
    model = kinformer.build(member, recipe=recipe, vocab_size=256, set=MEMBERS[member]).eval()
    watch: Watch = []
    begun, absorbed = time.perf_counter(), len(tokens) - generated
    with torch.inference_mode():
        logits, state = absorb(model, tokens[:absorbed], model.initial_state(1).reserve(1), watch)
        halfway = time.perf_counter()
        state = generate(model, tokens, absorbed, logits, state, watch)
        ended = time.perf_counter()
        _, truth = absorb(model.double(), tokens, None)
    warm = [point for point in watch if point["tokens"] >= len(tokens) // 20]
    growth = _peak(warm[len(warm) // 2 :]) - _peak(warm[: len(warm) // 2])
    sizes, buffers = ({point[name] for point in warm} for name in ("state_bytes", "buffer_bytes"))
    return {
        "member": member,
        "absorbed_per_second": absorbed / (halfway - begun),
        "generated_per_second": generated / (ended - halfway),
        "state_bytes": max(sizes),
        "buffer_bytes": max(buffers),
        "state_constant": len(sizes) == 1 and max(buffers) == warm[0]["buffer_bytes"],
        "resident_growth_bytes": growth,
        "resident_constant": growth < GROWTH,
        "relative_error": (error := relative_error(state, truth)),
        "right": error < ERROR,
        "watch": warm[:: max(1, len(warm) // 40)],
    }


def _peak(watch: Watch) -> int:
    return max(point["resident_bytes"] for point in watch)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--generated", type=int, default=10_000, help="how many of them are generated one by one")
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--data", help="text to absorb (the standard library's sources if not given)")
    options = prepare(parser)
    if options.quick:
        options.tokens, options.generated, options.recipe = 50_000, 500, "tiny"
    results = []
    for member in MEMBERS:
        tokens = text_bytes(options.data, options.tokens)
        results.append(run(member, options.recipe, tokens, options.generated))
    header = ("member", "absorbed/s", "generated/s", "state bytes", "resident +MiB", "error", "holds")
    rows = [
        [
            result["member"],
            result["absorbed_per_second"],
            result["generated_per_second"],
            result["state_bytes"],
            result["resident_growth_bytes"] / 2**20,
            result["relative_error"],
            result["state_constant"] and result["resident_constant"] and result["right"],
        ]
        for result in results
    ]
    show(f"{options.tokens:,} tokens, the last {options.generated:,} generated ({options.recipe})", header, rows)
    save(
        options,
        "stream",
        {"tokens": options.tokens, "generated": options.generated, "recipe": options.recipe, "chunk": CHUNK,
         "dtype": "float32 against float64", "results": results},
    )  # fmt: skip


if __name__ == "__main__":
    main()
