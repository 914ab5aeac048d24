"""What does a carried memory save in evaluation? A trained Transformer-XL, once with its state carried from segment to
segment, once with a window of --reach tokens computed anew for every token, as a model without memory has to.

Both use the weights of the run, with a memory of --reach tokens, and score the same bytes: the last --tokens of the
text. A gate comes first: over the first segment, before which there is nothing, both give the same logits. Told are
FLOPs (of products, counted on shapes) and seconds per token, and bits per byte.

    kinformer train transformer-xl --data book.txt --segments --length 256 --out runs/xl
    python benchmarks/xl_evaluation.py --run runs/xl --data book.txt
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from common import arguments, gate_equal, prepare, save, show, text_bytes
from kinformer.lab.runs.run import open_run


def carried(model: nn.Module, tokens: Tensor, segment: int, scored: int) -> tuple[float, list[float]]:
    """Nats of the last ``scored`` of ``tokens`` [time + 1] together, and the seconds of each whole segment."""
    state, nats, seconds = None, [], []
    for start in range(0, len(tokens) - 1, segment):
        part = tokens[start : min(start + segment, len(tokens) - 1)]
        begun = time.perf_counter()
        logits, state = model(part[None], state)
        seconds.append((time.perf_counter() - begun) / len(part))
        nats.append(cross_entropy(logits[0].float(), tokens[start + 1 : start + 1 + len(part)], reduction="none"))
    return float(torch.cat(nats)[-scored:].sum()), seconds


def windowed(model: nn.Module, tokens: Tensor, reach: int, scored: int) -> tuple[float, list[float]]:
    """The same with a new window of ``reach`` tokens for each."""
    nats, seconds = 0.0, []
    for end in range(len(tokens) - 1 - scored, len(tokens) - 1):
        window = tokens[max(0, end + 1 - reach) : end + 1]
        begun = time.perf_counter()
        logits = model.logits(model.hidden(window[None])[0][:, -1])
        seconds.append(time.perf_counter() - begun)
        nats += float(cross_entropy(logits.float(), tokens[end + 1 : end + 2]))
    return nats, seconds


def flops(model: nn.Module, segment: int, reach: int) -> dict[str, float]:
    """Per token, by shapes alone: a segment after ``reach`` tokens, and the last logits of a window."""
    model, counts = copy.deepcopy(model).to("meta"), {}

    def nothing(time: int) -> Tensor:
        return torch.zeros(1, time, dtype=torch.int64, device="meta")

    _, state = model(nothing(reach))
    works = {
        "carried": (lambda: model(nothing(segment), state), segment),
        "windows": (lambda: model.logits(model.hidden(nothing(reach))[0][:, -1]), 1),
    }
    for name, (work, tokens) in works.items():
        with FlopCounterMode(display=False) as counter:
            work()
        counts[name] = counter.get_total_flops() / tokens
    return counts


def gate(model: nn.Module, tokens: Tensor, segment: int) -> float:
    """Logits of the first segment, token by token anew against all at once."""
    anew = [model(tokens[None, : end + 1])[0][0, -1] for end in range(min(segment, 32))]
    return gate_equal("windows", torch.stack(anew), model(tokens[None, :segment])[0][0, : len(anew)], 1e-3)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run folder of a transformer-xl of bytes")
    parser.add_argument("--data", help="a text file (the standard library's sources if not given)")
    parser.add_argument("--reach", type=int, default=1024, help="tokens of memory, and of each window")
    parser.add_argument("--tokens", type=int, default=512, help="how many are scored")
    parser.add_argument("--text", type=int, default=65536, help="bytes that the carried state reads in all")
    options = prepare(parser)
    run = open_run(options.run)
    mixer = run.config.layers[0].mixer
    if mixer.kind != "segment_memory" or run.vocabulary != "bytes":
        raise SystemExit(f"{options.run}: is no run of transformer-xl on bytes.")
    segment = mixer.segment
    if options.quick:
        options.reach, options.tokens, options.text = 2 * segment, 8, 4 * segment
    if options.reach % segment:
        raise SystemExit(f"--reach {options.reach}: must be a multiple of the run's segment of {segment}.")
    if options.text <= options.tokens + options.reach:
        raise SystemExit(f"--text {options.text}: must be more than --tokens and --reach together.")
    tokens = text_bytes(options.data, options.text + 1)
    with torch.no_grad():
        model = run.model({"layers.*.mixer.memory": options.reach})
        gap, counts = gate(model, tokens, segment), flops(model, segment, options.reach)
        model.hidden(tokens[None, : options.reach])  # plans are made once
        ways = {
            "carried": carried(model, tokens, segment, options.tokens),
            "windows": windowed(model, tokens, options.reach, options.tokens),
        }
    result = {
        name: {
            "bits_per_byte": nats / options.tokens / math.log(2),
            "seconds_per_token": statistics.median(seconds),
            "flops_per_token": counts[name],
        }
        for name, (nats, seconds) in ways.items()
    }
    rows = [
        [name, one["bits_per_byte"], 1e3 * one["seconds_per_token"], one["flops_per_token"] / 1e6]
        for name, one in result.items()
    ]
    show(f"a reach of {options.reach} tokens", ("state", "bits per byte", "ms per token", "MFLOPs per token"), rows)
    ratios = {
        name: result["windows"][name] / result["carried"][name] for name in ("seconds_per_token", "flops_per_token")
    }
    print(
        f"windows take {ratios['seconds_per_token']:.0f} times as long, {ratios['flops_per_token']:.0f} times the FLOPs"
    )
    settings = {name: getattr(options, name) for name in ("reach", "tokens", "text")}
    settings |= {"data": Path(options.data).name if options.data else None, "segment": segment}
    save(options, "xl_evaluation", {"settings": settings, "gap": gap, "ways": result, "ratios": ratios})


if __name__ == "__main__":
    main()
