"""Combinations of position, pattern, score, projection, head and embedding keep their laws, or are refused when built.

    python benchmarks/combinations.py                     # all of them, in a random order: hours
    python benchmarks/combinations.py --count 500         # the first so many of that order
    python benchmarks/combinations.py --done FILE         # all, going on after those that FILE tells of
    python benchmarks/combinations.py --latent            # those of latent attention, which has its own projection

Positions, patterns, scores and projections are crossed; heads, embeddings, numbers of heads and gates are drawn along,
mostly such as fit each other. It prints what is refused, with the reasons, and what fails, with its law; and ends with
1 if anything does.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.layer import DecoderLayer, EncoderLayer
from kinformer.core.config import Config
from kinformer.core.encoder import GLOBAL
from kinformer.family.kinds import kinds
from kinformer.inputs.tokens import Tokens
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.latent import Form, LatentAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.models.decoder import Decoder
from kinformer.models.encoder import Encoder
from kinformer.parts.decays import Sigmoid
from kinformer.parts.output_parts import Gate
from kinformer.parts.patterns.sequence import Causal, Full, Intersection, Local
from kinformer.parts.positions import NoPosition
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_MODEL_CHECKS, MODEL_CHECKS, ContractError, EncoderModelSubject, ModelSubject
from kinformer.testing.subject import agree

DIM, VOCAB, TIME = 16, 19, 15
SMALL = {
    "window": 4, "stride": 3, "block": 4, "segment": 6, "memory": 5, "summary": 2, "random": 1, "length": 64,
    "height": 4, "width": 4, "block_height": 2, "block_width": 2, "flange_height": 1, "flange_width": 1,
    "max_distance": 9, "num_buckets": 8, "num_kv_heads": 2, "cutoffs": (4, 9), "divisor": 2, "classes": 3, "count": 2,
    "actions": 3, "action_dim": 2,
}  # fmt: skip
"""Sizes that a text of ``TIME`` tokens crosses more than once, by the names of fields."""
OWN_SIZES = {"convolved": {"width": 3}, "adaptive": {"width": None}, "random_blocks": {"count": 1}}
NEEDED = {
    "documents": {"starts": (7,)},
    "per_head": {"patterns": (Causal.Config(), Local.Config(window=3)) * 2},
    "union": {"patterns": (Local.Config(window=2), Local.Config(window=4))},
    "intersection": {"patterns": (Causal.Config(), Local.Config(window=4))},
    "complement": {"pattern": Local.Config(window=2)},
    "masked_patches": {"layers": (EncoderLayer.Config(mixer=BidirectionalAttention.Config(num_heads=2)),), "dim": 8},
}
LAWS = ("causality", "partition", "padding", "reset")
FITTING = 0.9
"""The share of heads and embeddings that are drawn to fit."""
SLOTS = ("position", "pattern", "score", "projection")
ALONG = ("head", "embedding")


class Combination(NamedTuple):
    """Parts by slot, the number of heads, of which kind the model is, or its form of latent attention, and whether its
    scores fade."""

    model: str
    num_heads: int
    parts: dict[str, Config]
    gate: str
    fades: bool = False

    def __str__(self) -> str:
        told = ", ".join(f"{slot} {part.kind}" for slot, part in self.parts.items())
        return f"{self.model} of {self.num_heads} heads: {told}, gate {self.gate}" + ", a decay" * self.fades

    def config(self) -> Any:
        """The model's, of one layer."""
        parts = self.parts
        at_tokens = stands_at_tokens(parts["position"])
        encoder = self.model == "encoder"
        pattern = parts["pattern"]
        if not encoder and pattern.build().ahead != 0:
            pattern = Intersection(patterns=(Causal.Config(), pattern))
        settings = {slot: parts[slot] for slot in ("score", "projection") if slot in parts} | {"pattern": pattern}
        settings["gate"] = self.gate
        settings["position"] = NoPosition.Config() if at_tokens else parts["position"]
        kind = {"encoder": BidirectionalAttention, "decoder": SoftmaxAttention}.get(self.model, LatentAttention)
        settings |= {"form": self.model} if kind is LatentAttention else {}
        settings |= {"decay": Sigmoid.Config(coupled=False)} if self.fades else {}
        mixer = kind.Config(num_heads=self.num_heads, **settings)
        layer = EncoderLayer if encoder else DecoderLayer
        return (Encoder if encoder else Decoder).Config(
            input=Tokens.Config(vocab_size=VOCAB, embedding=parts["embedding"]),
            dim=DIM,
            layers=(layer.Config(mixer=mixer, feed_forward=MLP.Config(hidden_dim=DIM)),),
            position=parts["position"] if at_tokens else NoPosition.Config(),
            head=parts["head"],
        )


def stands_at_tokens(position: Any) -> bool:
    """Whether a position is a model's, and not a mixer's."""
    try:
        position.build_model(DIM, 1)
    except KinformerError:
        return False
    return True


def smallest(config: type[Config]) -> Config:
    """The kind of part in the sizes of these tests."""
    given = dict(NEEDED.get(config.kind, {}))
    own = SMALL | OWN_SIZES.get(config.kind, {})
    for field in fields(config):
        if field.name in own and field.name not in given:
            given[field.name] = own[field.name]
        elif field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(f"{config.slot} {config.kind} needs {field.name}: say one in benchmarks/combinations.py")
    return config(**given)


def combinations(seed: int = 0) -> Iterator[Combination]:
    """All, in a random order."""
    table, draw = kinds(), random.Random(seed)
    parts = {slot: [smallest(table[slot][kind]) for kind in table[slot]] for slot in (*SLOTS, *ALONG)}
    crossed = list(itertools.product(("decoder", "encoder"), *(parts[slot] for slot in SLOTS)))
    draw.shuffle(crossed)
    pairs = list(itertools.product(*(parts[slot] for slot in ALONG)))
    fitting = {model: [pair for pair in pairs if _fit(model, *pair)] for model in ("decoder", "encoder")}
    for number, (model, *chosen) in enumerate(crossed):
        pair = draw.choice(fitting[model] if draw.random() < FITTING else pairs)
        found = dict(zip((*SLOTS, *ALONG), (*chosen, *pair), strict=True))
        fades = model == "decoder" and number % 4 == 0
        yield Combination(model, draw.choice((2, 4)), found, draw.choice(get_args(Gate)), fades)


def latent_combinations(seed: int = 0) -> Iterator[Combination]:
    """All positions, patterns and scores in latent attention, in a random order; its form and gate are drawn along."""
    table, draw = kinds(), random.Random(seed)
    slots = ("position", "pattern", "score")
    parts = [[smallest(table[slot][kind]) for kind in table[slot]] for slot in slots]
    crossed = list(itertools.product(*parts))
    draw.shuffle(crossed)
    ends = {slot: smallest(table[slot][kind]) for slot, kind in (("head", "language"), ("embedding", "lookup"))}
    for chosen in crossed:
        found = dict(zip(slots, chosen, strict=True)) | ends
        yield Combination(draw.choice(get_args(Form)[1:]), draw.choice((2, 4)), found, draw.choice(get_args(Gate)))


def _fit(model: str, head: Any, embedding: Any) -> bool:
    try:
        head.check(DIM, Tokens.Config(vocab_size=VOCAB, embedding=embedding).build(DIM))
    except KinformerError:
        return False
    return model == "encoder" or head.per_position


def verdict(combination: Combination, skip: tuple[str, ...] = ()) -> tuple[str, str]:
    """``kept``, ``refused`` with the reason, or ``failed`` with the law; ``skip``: decoders' laws that are left out."""
    try:
        config = combination.config()
        config.build()
    except KinformerError as error:
        return "refused", str(error)
    laws = _laws_of_encoders(config, combination) if combination.model == "encoder" else _laws_of_decoders(config, skip)
    for law in laws:
        try:
            law()
        except (ContractError, AssertionError) as error:
            return "failed", str(error)
    return "kept", ""


def _laws_of_decoders(config: Any, skip: tuple[str, ...]) -> Iterator[Callable[[], None]]:
    subject = ModelSubject(config.build, VOCAB, batch=2, time=TIME)
    for name in LAWS:
        if name not in skip:
            yield lambda name=name: MODEL_CHECKS[name](subject)  # type: ignore[misc]


def _laws_of_encoders(config: Any, combination: Combination) -> Iterator[Callable[[], None]]:
    subject = EncoderModelSubject(config.build, VOCAB, batch=2, time=TIME)
    for name in ("rows", "padding"):
        yield lambda name=name: ENCODER_MODEL_CHECKS[name](subject)  # type: ignore[misc]
    if isinstance(combination.parts["pattern"], Full.Config) and combination.parts["projection"].kind == "multi_head":
        yield lambda: _marking_changes_nothing(subject)


def _marking_changes_nothing(subject: EncoderModelSubject) -> None:
    """Where all see all, global tokens are as all others."""
    model = subject.build()
    with torch.no_grad():
        plain = next(subject.cases())
        kinds = torch.where(torch.arange(TIME) % 7 == 2, GLOBAL, 0).expand(len(plain.inputs), -1)
        marked = subject.run(model, plain._replace(text={"kinds": kinds}))
        agree("outputs when tokens are marked global in a full pattern", marked, subject.run(model, plain), 1e-9)


def told(done: Path | None) -> list[Any]:
    """``[outcome, why, processor seconds]`` of an earlier run; a line that it was killed in does not count."""
    if done is None or not done.exists():
        return []
    whole = done.read_text().rpartition("\n")[0]
    done.write_text(whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]


def main() -> int:
    from common import arguments, prepare, save

    parser = arguments(__doc__)
    parser.add_argument(
        "--count", type=int, default=None, help="the first so many only; a result file if --out names one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order, and of what is drawn along")
    parser.add_argument("--done", type=Path, help="a file of outcomes, to go on after; of the same seed and table")
    parser.add_argument("--latent", action="store_true", help="combinations of latent attention")
    parser.set_defaults(threads=1)
    options = prepare(parser)
    options.count = 100 if options.quick else options.count
    warnings.simplefilter("ignore")
    outcomes = told(options.done)
    with open(options.done or os.devnull, "a") as file:
        every = latent_combinations if options.latent else combinations
        for combination in itertools.islice(every(options.seed), len(outcomes), options.count):
            begun = time.process_time()
            outcome, why = verdict(combination)
            if outcome == "failed":
                why = f"{combination}\n        {why}"
                print(f"FAILED  {why}", flush=True)
            outcomes.append((outcome, why, time.process_time() - begun))
            print(json.dumps(outcomes[-1]), file=file, flush=True)
    result = summary(outcomes)
    if options.count is None or options.out:
        of = {"seed": options.seed, "of": sum(1 for _ in every(options.seed))}
        save(options, "latent_combinations" if options.latent else "combinations", of | result)
    return 1 if result["failed"] else 0


def summary(outcomes: Sequence[Any]) -> dict[str, Any]:
    """How many keep their laws, how many are refused and why, and which fail; printed too."""
    reasons = Counter(why for outcome, why, _ in outcomes if outcome == "refused").most_common()
    for why, count in reasons:
        print(f"refused {count:5d} x  {why}")
    counts = Counter(outcome for outcome, *_ in outcomes)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return {
        "combinations": len(outcomes),
        "kept": counts["kept"],
        "refused": counts["refused"],
        "failed": counts["failed"],
        "processor_seconds": round(sum(seconds for *_, seconds in outcomes)),
        "failures": [why for outcome, why, _ in outcomes if outcome == "failed"],
        "reasons": dict(reasons),
    }


if __name__ == "__main__":
    sys.exit(main())
