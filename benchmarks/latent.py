"""What does latent attention cost that remembers one small vector a token, and when is it worth to absorb matrices?

    python benchmarks/latent.py                 # some three minutes on two cores

One layer of width 512 with 8 heads of 64 in float32: latent attention (a latent of 256 numbers and 32 rotary features)
in its two forms, softmax attention with 8 heads of keys and with 2 (grouped), and transformers' DeepSeek-V3 attention.
Timed in rounds: a token after so many others, and the forward and backward of a whole text. The two forms must give
the same, and transformers' module the same as ours with our weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common import Contestant, arguments, gate_equal, interleave, peer, prepare, save, show
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import nbytes
from kinformer.mixers.latent import LatentAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.projections import Grouped
from kinformer.parts.relative_positions import Rope

DIM, HEADS, LATENT, ROTARY, TOLERANCE = 512, 8, 256, 32, 1e-4
LATENT_CONFIG = LatentAttention.Config(num_heads=HEADS, latent_dim=LATENT, rotary_dim=ROTARY)
SOFTMAX = SoftmaxAttention.Config(num_heads=HEADS, position=Rope.Config(), bias=False)
OURS = {
    "latent, absorbed": LATENT_CONFIG.replace(form="absorbed"),
    "latent, expanded": LATENT_CONFIG.replace(form="expanded"),
    "softmax, 8 heads of keys": SOFTMAX,
    "softmax, 2 heads of keys": SOFTMAX.replace(projection=Grouped.Config(num_kv_heads=2, bias=False)),
}


def mixers() -> dict[str, CausalMixer]:
    """The mixers; both forms of latent attention have the same weights."""
    torch.manual_seed(0)
    built = {name: config.build(DIM) for name, config in OURS.items()}
    built["latent, expanded"].load_state_dict(built["latent, absorbed"].state_dict())
    return built


def deepseek(ours: Any) -> Callable[[Tensor, Any], tuple[Tensor, Any]] | None:
    """transformers' module with the weights of ``ours`` and a cache, as a function of x [1, time, dim] and a state."""
    if peer("transformers") is None:
        return None
    from transformers.cache_utils import DynamicCache
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=None, kv_lora_rank=LATENT,
        qk_nope_head_dim=64, qk_rope_head_dim=ROTARY, v_head_dim=64, attn_implementation="sdpa",
    )  # fmt: skip
    module, rotary = theirs.DeepseekV3Attention(config, 0).eval(), theirs.DeepseekV3RotaryEmbedding(config)
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (module.q_proj, ours.query), (module.kv_a_proj_with_mqa, ours.down), (module.kv_a_layernorm, ours.norm),
        (module.kv_b_proj, ours.up), (module.o_proj, ours.out),
    ]  # fmt: skip
    with torch.no_grad():
        for other, mine in pairs:
            other.weight.copy_(mine.weight)  # type: ignore[operator, union-attr]

    def attend(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        cache = DynamicCache() if state is None else state
        begun = cache.get_seq_length()
        places = torch.arange(begun, begun + x.shape[1])[None]
        mask = None
        if x.shape[1] > 1:
            mask = torch.full((x.shape[1], begun + x.shape[1]), -torch.inf).triu(begun + 1)[None, None]
        y, _ = module(x, rotary(x, places), mask, past_key_values=cache)
        return y, cache

    return attend


def step_times(past: int, rounds: int, quick: bool) -> dict[str, dict[str, float]]:
    """Times of one token more after ``past`` others, in reserved states, and what those remember a token."""
    x, steps = torch.randn(1, past, DIM), 4 if quick else 32
    built, contestants, remembered = mixers(), [], {}

    def run(mixer: CausalMixer, state: Any) -> None:
        after = state.fork()
        for token in x[:, :steps].split(1, 1):
            _, after = mixer(Chunk(token), after)

    with torch.no_grad():
        for name, mixer in built.items():
            _, state = mixer(Chunk(x), mixer.initial_state(1))
            remembered[name] = (nbytes(state) - 8) / past
            contestants.append(Contestant(name, partial(run, mixer, state.reserve(2 * steps))))
        theirs = deepseek(built["latent, absorbed"])
        if theirs is not None:
            _, cache = theirs(x, None)
            remembered["transformers, DeepSeek-V3"] = (
                sum(part.numel() * 4 for layer in cache.layers for part in (layer.keys, layer.values))
                / cache.get_seq_length()
            )

            def other() -> None:
                for token in x[:, :steps].split(1, 1):
                    theirs(token, cache)
                cache.crop(-steps)

            contestants.append(Contestant("transformers, DeepSeek-V3", other))
        interleave(contestants, rounds)
    return {
        each.name: {"milliseconds": each.median * 1000 / steps, "bytes_a_token": remembered[each.name]}
        for each in contestants
    }


def learned(attend: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = attend(x)
    return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]


def training_times(length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Times of a forward and backward of a text of ``length`` tokens."""
    x, everyone = torch.randn(1, length, DIM), {}
    for name, mixer in mixers().items():
        everyone[name] = lambda x, mixer=mixer: mixer(Chunk(x), mixer.initial_state(1))[0]
    theirs = deepseek(mixers()["latent, absorbed"])
    if theirs is not None:
        everyone["transformers, DeepSeek-V3"] = lambda x: theirs(x, None)[0]
    contestants = [Contestant(name, partial(learned, attend, x)) for name, attend in everyone.items()]
    interleave(contestants, rounds)
    return {each.name: {"milliseconds": each.median * 1000} for each in contestants}


def gate() -> float:
    """Hold the forms, and transformers' module, to each other; return the largest gap."""
    x, built = torch.randn(1, 100, DIM), mixers()
    want = learned(lambda x: built["latent, absorbed"](Chunk(x), built["latent, absorbed"].initial_state(1))[0], x)
    expanded = built["latent, expanded"]
    others = {"expanded": lambda x: expanded(Chunk(x), expanded.initial_state(1))[0]}
    theirs = deepseek(built["latent, absorbed"])
    if theirs is not None:
        others["transformers"] = lambda x: theirs(x, None)[0]
    pairs = {name: learned(attend, x) for name, attend in others.items()}
    values = [(name, *pair) for name, got in pairs.items() for pair in zip(got, want, strict=True)]
    return max(gate_equal(*value, TOLERANCE) for value in values)


def main() -> None:
    options = prepare(arguments(__doc__))
    rounds = options.rounds or (1 if options.quick else 7)
    gap = gate()
    steps = {past: step_times(past, rounds, options.quick) for past in ([64] if options.quick else [1024, 4096, 16384])}
    whole = {length: training_times(length, rounds) for length in ([64] if options.quick else [1024, 4096])}
    for past, times in steps.items():
        rows = [[name, row["milliseconds"], int(row["bytes_a_token"])] for name, row in times.items()]
        show(f"one token after {past:,}", ("layer", "ms", "bytes a token"), rows)
    for length, times in whole.items():
        show(f"forward and backward of {length:,}", ("layer", "ms"), [[n, r["milliseconds"]] for n, r in times.items()])
    shape = {"dim": DIM, "heads": HEADS, "latent_dim": LATENT, "rotary_dim": ROTARY}
    save(options, "latent", {"shape": shape, "rounds": rounds, "gap": gap, "steps": steps, "training": whole})


if __name__ == "__main__":
    main()
