"""How long does one more token take? 784 tokens from a prompt of one, greedy, without gradients, batch 1 and 16; with
``--tokens 96`` so many, batch 1.

8 layers, 8 heads x 32, dim 256, feed-forward 1024, vocabulary 256: the shape of the Linear Transformer's image model.

    ours           kinformer's Session with weights in float32 and bfloat16, with all steps made in Python, and, of few
                   tokens, as a model's first session, which records its step
    idiap          the recurrent form of pytorch-fast-transformers, its state handed from step to step
    GPT-2          transformers with its key-value cache, one forward per token
    x-transformers its own generate with its cache

All with PyTorch's default fp32 products. With --run DIR it instead measures what bfloat16 weights cost in quality: bits
per byte of a trained run on its own held-out data, with the weights as they are and rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import cache, partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from common import Contestant, arguments, gate_equal, interleave, peer, prepare, save, show
from kinformer.family.build import configure
from kinformer.generation.recording import recordings_of
from kinformer.generation.session import Session
from kinformer.generation.weights import pack
from kinformer.lab.comparison.speed import Floor, measure_floor
from kinformer.lab.data import open_corpus
from kinformer.lab.evaluation.bits import Windows, measure
from kinformer.lab.runs.run import open_run
from peers import HuggingFace, Idiap, PeerShape, copy_gpt2, hugging_face, idiap, x_transformers

LAYERS, TOKENS = 8, 784
MILLISECONDS = {
    ("linear-transformer fp32", 1): 1.9,
    ("linear-transformer fp32", 16): 3.3,
    ("gpt fp32", 1): 2.3,
    ("gpt fp32", 16): 8.0,
    ("linear-transformer bf16", 1): 1.2,
    ("linear-transformer bf16", 16): 2.2,
}
"""What to reach per step, (contestant, batch); where the peers needed 2.35 and 3.70 (idiap), 3.32 and 14.6 (GPT-2),
4.28 and 32.9 (x-transformers). Figures of another machine of this kind: the ratios are what counts."""
BITS = 0.002

Generate = Callable[[int, int], Tensor]


def linear_transformer() -> nn.Module:
    return configure("linear-transformer", "paper", 256).build().eval()


def gpt() -> nn.Module:
    config = configure("gpt", "small", 256, {"layers.*.mixer.num_heads": 8})
    return replace(config, layers=config.layers[:1] * LAYERS).build().eval()


def with_session(model: nn.Module, batch: int, tokens: int, recorded: bool = True, first: bool = False) -> Tensor:
    """``tokens`` new tokens of ``batch`` rows, [batch, tokens], as `kinformer generate` draws them; ``first``: with no
    recording of an earlier session."""
    if first:
        recordings_of(packed(model, batch)).clear()
    session = Session(packed(model, batch), batch, temperature=0, room=tokens + 1, recorded=recorded)
    session.feed(torch.zeros(batch, 1, dtype=torch.int64))
    return torch.stack([session.step() for _ in range(tokens)], dim=1)


@cache
def packed(model: nn.Module, batch: int) -> nn.Module:
    return pack(model)


def with_recurrence(model: Idiap, batch: int, tokens: int) -> Tensor:
    token, state, drawn = torch.zeros(batch, dtype=torch.int64), None, []
    with torch.inference_mode():
        for position in range(tokens):
            logits, state = model.one(token, position, state)
            token = logits.argmax(dim=-1)
            drawn.append(token)
    return torch.stack(drawn, dim=1)


def with_cache(model: HuggingFace, batch: int, tokens: int) -> Tensor:
    token, cache, drawn = torch.zeros(batch, 1, dtype=torch.int64), None, []
    with torch.inference_mode():
        for _ in range(tokens):
            output = model.model(token, past_key_values=cache, use_cache=True)
            cache, token = output.past_key_values, output.logits[:, -1:].argmax(dim=-1)
            drawn.append(token)
    return torch.cat(drawn, dim=1)


def with_wrapper(wrapper: Any, batch: int, tokens: int) -> Tensor:
    prompt = torch.zeros(batch, 1, dtype=torch.int64)
    with torch.inference_mode(), redirect_stdout(StringIO()):
        return wrapper.generate(prompt, tokens, temperature=0.0, cache_kv=True)


def field() -> dict[str, Generate]:
    """Name -> function of (batch, tokens)."""
    shape = PeerShape(layers=LAYERS, dim=256, heads=8, head_dim=32, hidden=1024, length=1024)
    torch.manual_seed(0)
    linear, plain, found = linear_transformer(), gpt(), {}
    theirs, recurrent, extra = hugging_face(shape), idiap(shape, recurrent=True), x_transformers(shape)
    if theirs is not None:
        copy_gpt2(theirs, plain)
        found["GPT-2 (transformers)"] = partial(with_cache, theirs.eval())
    for name, model in (("linear-transformer", linear), ("gpt", plain)):
        rounded = type(model)(model.config).eval()
        rounded.load_state_dict(model.state_dict())
        found[f"{name} fp32"] = partial(with_session, model)
        found[f"{name} bf16"] = partial(with_session, rounded.bfloat16())
        found[f"{name} fp32, first"] = partial(with_session, model, first=True)
        found[f"{name} bf16, first"] = partial(with_session, rounded, first=True)
        found[f"{name} fp32, in Python"] = partial(with_session, model, recorded=False)
        found[f"{name} bf16, in Python"] = partial(with_session, rounded, recorded=False)
        gate(name, model)
    if theirs is not None:
        gate("GPT-2 through its cache", plain, with_cache(theirs, 2, 64))
    if recurrent is not None:
        found["idiap"] = partial(with_recurrence, recurrent.eval())
    if extra is not None:
        wrapper = peer("x_transformers").AutoregressiveWrapper(extra).eval()
        found["x-transformers"] = partial(with_wrapper, wrapper)
    return found


def gate(name: str, model: nn.Module, tokens: Tensor | None = None) -> None:
    """Every token generated must be the likeliest by one forward pass over the whole text (up to rounding)."""
    tokens = with_session(model, 2, 64) if tokens is None else tokens
    text = torch.cat([tokens.new_zeros(len(tokens), 1), tokens], dim=1)
    with torch.no_grad():
        logits = model(text[:, :-1])[0]
    gate_equal(name, logits.gather(-1, tokens[..., None])[..., 0], logits.amax(dim=-1), 1e-4)


def race(batch: int, tokens: int, rounds: int) -> dict[str, float]:
    """Name -> median milliseconds per step."""
    contestants = [Contestant(name, partial(generate, batch, tokens)) for name, generate in field().items()]
    interleave(contestants, rounds)
    return {contestant.name: contestant.median * 1000 / tokens for contestant in contestants}


def least(name: str, floor: Floor) -> float:
    """Milliseconds in which the weights, which are alike for all, can be read once."""
    weights = sum(weight.numel() for weight in linear_transformer().parameters())
    return 1000 * weights * (2 if "bf16" in name else 4) / floor.bandwidth


def cost_of_rounding(folder: str, quick: bool) -> dict[str, Any]:
    """Bits per byte of a run on its held-out data, with its weights in float32 and in bfloat16."""
    run = open_run(folder)
    if run.vocabulary != "bytes":
        raise SystemExit(f"{folder}: has a tokenizer, but this measures runs on bytes; give such a run.")
    split = open_corpus(run.data["spec"], holdout=run.data.get("holdout")).splits["test"]
    split = split.take(4096) if quick else split
    model = run.model()
    windows = Windows(context=int(run.training["length"]))
    bits = [measure(model.to(dtype), split, windows).bits_per_byte for dtype in (torch.float32, torch.bfloat16)]
    return {"run": run.member, "fp32": bits[0], "bf16": bits[1], "difference": bits[1] - bits[0], "tolerance": BITS}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--run", help="a run folder: measure what bfloat16 weights cost in bits per byte instead")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="new tokens of a session (784)")
    options = prepare(parser)
    if options.run:
        result = cost_of_rounding(options.run, options.quick)
        show("bits per byte by the type of the weights", list(result), [list(result.values())])
        save(options, "generation_quality", result)
        return
    short = options.tokens != TOKENS
    tokens = 32 if options.quick else options.tokens
    rounds = options.rounds or (1 if options.quick else 15 if short else 3)
    points, floor = [], measure_floor("cpu")
    for batch in (1,) if short else (1, 16):
        found = race(batch, tokens, rounds)
        rows = [
            {"name": name, "ms_per_step": value, "tokens_per_second": batch * 1000 / value,
             "of_floor": least(name, floor) / value, "target": None if short else MILLISECONDS.get((name, batch))}
            for name, value in sorted(found.items(), key=lambda item: item[1])
        ]  # fmt: skip
        points.append({"batch": batch, "contestants": rows})
        header = ("contestant", "ms a step", "tokens/s", "of floor", "to reach")
        show(f"{tokens} tokens, batch {batch}", header, [list(row.values()) for row in rows])
    result = {
        "shape": "8 x 256, 8 heads x 32",
        "tokens": tokens,
        "rounds": rounds,
        "floor": asdict(floor),
        "points": points,
    }
    save(options, f"generation_{options.tokens}" if short else "generation", result)


if __name__ == "__main__":
    main()
