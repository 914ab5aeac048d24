"""Is this checkout as fast as another one? The same work in both, in turns, each in a process of its own.

    python benchmarks/versions.py --other PATH        # PATH: the root of another checkout, such as one of a release

    training     forward and backward of a model, 4 layers, dim 256, 8 x 512 tokens
    attention    forward and backward of a layer's attention, 1 x 4,096 tokens, 8 heads x 64: patterns and positions
    encoder      forward and backward of a one-layer encoder, 1 x 4,096 tokens
    memorizing   a segment of 512 forward and backward beside 65,536 memories
    generation   one more token, 4 layers, dim 256, a prompt of 256

Only what both versions know is used: members, recipes and configs by name. Both must compute the same from the same
seed, which is the gate; the result is the median over the rounds of the ratio of two neighbouring measurements. Both
work with one thread unless --threads says otherwise: with two threads each on two cores, the same code beside itself
had ratios of 0.47 to 1.1 in generation of one sequence, as threads of the one that waits still take time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORD = "--worker"
ROOT = Path(__file__).parents[1]
LOCAL = {"kind": "local", "window": 256}
ATTENTION = {
    "causal": {},
    "window 256": {"pattern": LOCAL},
    "strided 128": {"pattern": {"kind": "strided", "stride": 128}},
    "fixed 128": {"pattern": {"kind": "fixed", "segment": 128, "summary": 8}},
    "alibi": {"position": "alibi"},
    "t5": {"position": "t5"},
    "shaw": {"position": "shaw"},
    "distance-aware": {"position": "distance_aware"},
}
TRAINED = ("gpt", "linear-transformer", "fast-weights", "transformer-xl", "local")
ENCODERS = ("bert", "longformer", "big-bird", "etc")
GENERATED = ("gpt", "linear-transformer", "fast-weights", "local", "transformer-xl", "sha-rnn")

Case = Callable[[], Any]


def cases() -> dict[str, Callable[[], Case]]:
    """Name of each case and what prepares it; a prepared one does its work once and returns numbers for the gate."""
    found: dict[str, Callable[[], Case]] = {}
    for member in TRAINED:
        found[f"training, {member}"] = lambda member=member: trained(member, 8, 512, {})
    for name, changes in ATTENTION.items():
        found[f"attention, {name}"] = lambda changes=changes: attended(changes)
    for member in ENCODERS:
        found[f"encoder, {member}"] = lambda member=member: trained(member, 1, 4096, {"layers": 1})
    found["memorizing"] = memorizing
    for member in GENERATED:
        for batch in (1, 16):
            found[f"generation, {member}, batch {batch}"] = lambda member=member, batch=batch: generated(member, batch)
    return found


def trained(member: str, batch: int, length: int, changes: dict[str, Any]) -> Case:
    import torch

    import kinformer

    torch.manual_seed(0)
    model = kinformer.build(member, recipe="benchmark", vocab_size=259, set=changes)
    tokens = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        model.zero_grad(set_to_none=True)
        logits = model(tokens)
        logits = logits if isinstance(logits, torch.Tensor) else logits[0]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        return float(loss.detach())

    return step


def attended(changes: dict[str, Any]) -> Case:
    import torch

    from kinformer.core.config import from_dict
    from kinformer.core.contract import Chunk, MixerConfig
    from kinformer.family.kinds import kinds

    torch.manual_seed(0)
    mixer: Any = from_dict(MixerConfig, {"kind": "softmax", "num_heads": 8, **changes}, kinds()).build(512)
    x = torch.randn(1, 4096, 512, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def step() -> float:
        mixer.zero_grad(set_to_none=True)
        y, _ = mixer(Chunk(x), mixer.initial_state(1))
        y.square().mean().backward()
        return float(y.detach().square().mean())

    return step


def memorizing() -> Case:
    import torch

    from kinformer.core.config import from_dict
    from kinformer.core.contract import Chunk, MixerConfig
    from kinformer.core.state import detach
    from kinformer.family.kinds import kinds

    torch.manual_seed(0)
    sizes = {"num_heads": 8, "window": 512, "segment": 512, "memory_size": 65536, "topk": 32, "search": "bucketed"}
    mixer: Any = from_dict(MixerConfig, {"kind": "memorizing", **sizes}, kinds()).build(512)
    generator = torch.Generator().manual_seed(1)
    state = mixer.initial_state(1)
    with torch.no_grad():
        for _ in range(18):
            state = mixer(Chunk(torch.randn(1, 4096, 512, generator=generator)), state)[1]
    state = detach(state)
    x = torch.randn(1, 512, 512, generator=generator, requires_grad=True)

    def step() -> float:
        mixer.zero_grad(set_to_none=True)
        y, _ = mixer(Chunk(x), state)
        y.square().mean().backward()
        return float(y.detach().square().mean())

    return step


def generated(member: str, batch: int) -> Case:
    import torch

    import kinformer
    from kinformer.generation.session import Session

    torch.manual_seed(0)
    model = kinformer.build(member, recipe="benchmark", vocab_size=256).eval()
    session = Session(model, batch, temperature=0, room=4000)
    session.feed(torch.randint(256, (batch, 256), generator=torch.Generator().manual_seed(1)))

    def step() -> float:
        return float(sum(int(session.step().sum()) for _ in range(16)))

    return step


def worker() -> None:
    """Prepare the case whose name comes on standard input, then do it once for every line and tell seconds, numbers."""
    import torch

    try:
        from kinformer.runtime.process import begin_process
    except ImportError:  # a version before this one
        from kinformer.training.precision import use_fast_products as begin_process

    begin_process()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    known, step = cases(), None
    for line in sys.stdin:
        name = line.strip()
        if name:
            step = known[name]()
        assert step is not None
        begun = time.perf_counter()
        value = step()
        print(time.perf_counter() - begun, value, flush=True)


class Checkout:
    """A process that works with the sources below ``root``."""

    def __init__(self, root: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": str(threads)}
        environment["THP_MEM_ALLOC_ENABLE"] = "1"
        command = [sys.executable, str(Path(__file__).resolve()), WORD]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(self, name: str = "") -> tuple[float, float]:
        """Seconds and numbers of one step; a name prepares that case first."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        seconds, value = self.process.stdout.readline().split()
        return float(seconds), float(value)


def compare(name: str, here: Checkout, other: Checkout, rounds: int) -> dict[str, float]:
    """The gate, then seconds of both in turns."""
    (_, value), (_, wanted) = here.run(name), other.run(name)
    if abs(value - wanted) > 1e-4 * max(1.0, abs(wanted)):
        raise SystemExit(f"{name}: {value} here, {wanted} there; both must compute the same before they are timed.")
    pairs = []
    for number in range(rounds + 1):
        order = (here, other) if number % 2 else (other, here)
        found = {checkout: checkout.run()[0] for checkout in order}
        pairs.append((found[here], found[other]))
    mine, theirs = zip(*pairs[1:], strict=True)
    ratio = statistics.median(one / two for one, two in pairs[1:])
    return {"here": statistics.median(mine), "other": statistics.median(theirs), "ratio": ratio}


def main() -> None:
    from common import arguments, prepare, save, show

    parser = arguments(__doc__)
    parser.add_argument("--other", type=Path, required=True, help="the root of the other checkout")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    options = prepare(parser)
    threads = options.threads or 1
    here, other = Checkout(ROOT, threads), Checkout(options.other.resolve(), threads)
    rounds = 2 if options.quick else options.rounds or 15
    found = {}
    for name in cases():
        if name.startswith(options.only):
            found[name] = compare(name, here, other, rounds)
    rows = [
        [name, f"{1e3 * each['here']:.1f}", f"{1e3 * each['other']:.1f}", f"{each['ratio']:.3f}"]
        for name, each in found.items()
    ]
    show("this checkout beside the other", ("work", "here ms", "other ms", "ratio"), rows)
    versions = {name: _revision(root) for name, root in (("here", ROOT), ("other", options.other))}
    save(options, "versions", {"rounds": rounds, "threads": threads, "revisions": versions, "results": found})


def _revision(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    worker() if WORD in sys.argv else main()
