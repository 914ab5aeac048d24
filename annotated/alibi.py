# # Biases by distance: ALiBi and T5
#
# *Paper: Press et al., Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation (2021),
# arXiv 2108.12409; Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer
# (2019), arXiv 1910.10683. Members: `alibi`, `t5`. Measured: extrapolation, sparse, quality.*
#
# **Problem.** Learned or sinusoidal positions, added to tokens, tie a model to the lengths of its training. A model
# trained on texts of 128 tokens meets vectors at position 129 that it has never seen, and fails.
#
# **Idea.** Leave the tokens alone. Tell attention how far a key lies back, by adding a number to the score:
#
# $$ s_{ij} = q_i \cdot k_j \, c + b_h(i - j) $$
#
# The number depends on the distance $i - j$ and on the head $h$ only. ALiBi fixes it as a straight line, $b_h(n) = -m_h
# n$. T5 learns it, one number for each head and range of distances.

import math

import torch
from torch import nn

# ## ALiBi: straight lines
#
# The slopes $m_h$ are a geometric series that ends at $2^{-8}$, whatever the number of heads. A head with the slope 1/2
# halves its attention every 1.4 tokens. A head with the slope 1/256 does so every 177 tokens.
#
# $$ m_h = 2^{-8 h / H}, \quad h = 1, \ldots, H $$
#
# The formula holds where $H$ is a power of two. The authors fill up other numbers: 12 heads have the slopes of 8 heads,
# then every second slope of 16 heads. The jump between them is intended, and released models have it.


def slopes(num_heads):
    power = 2 ** int(math.log2(num_heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    second = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return torch.tensor((first + second)[:num_heads], dtype=torch.get_default_dtype())


# ## T5: learned steps
#
# T5 has 32 buckets a head. The distances 0 to 15 have a bucket each. The buckets 16 to 31 widen with the logarithm of
# the distance up to 128, and the last one holds all larger distances. So near tokens are told apart exactly, far tokens
# roughly.
#
# $$ \mathrm{bucket}(n) = \min(31, \; 16 + \lfloor 16 \, \frac{\ln(n / 16)}{\ln(128 / 16)} \rfloor), \quad n \ge 16 $$


def bucket(distance, num_buckets=32, max_distance=128):
    """Return the bucket of each distance, for the keys that a causal query sees."""
    exact = num_buckets // 2
    ratio = (distance.clamp_min(exact) / exact).log() / math.log(max_distance / exact)
    wide = exact + (ratio * (num_buckets - exact)).long()
    return torch.where(distance < exact, distance, wide.clamp_max(num_buckets - 1))


# ## Attention with a bias
#
# The bias is added after the scale, so it does not shrink where heads are wide. ALiBi scales scores by $1 / \sqrt{d}$,
# as usual, to keep their standard deviation near 1. T5 takes $c = 1$: it begins with smaller weights of the queries
# instead, so the first scores are as small.
#
# Softmax ignores a constant of the row. Therefore $-m (i - j)$ and $+m j$ give the same weights in a causal decoder,
# and some implementations add $m j$. In an encoder the distance has two sides, and only $-m |i - j|$ is right.


def distances(queries, keys):
    """Return how far each key lies behind each query, [queries, keys]; keys ahead have negative distances."""
    start = keys - queries
    return torch.arange(start, keys)[:, None] - torch.arange(keys)


def attention(q, k, v, scale, bias):
    """q [batch, heads, time, head_dim], k and v [batch, heads, start + time, head_dim] -> the shape of q."""
    scores = q @ k.mT * scale + bias
    future = distances(q.shape[2], k.shape[2]) < 0
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


# ## The layers, and the cached step
#
# Keys and values do not know their positions. The state is the pair (k, v), as in plain attention, and a later token
# computes its own row of biases. Nothing in it has to be recomputed when the text grows, and a text may grow beyond all
# lengths of the training. Causality is the mask's work: without it, ALiBi would even prefer keys far ahead, whose
# distance is negative.


class Attention(nn.Module):
    def __init__(self, dim, num_heads, bias):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        scale, bias = self.scale_and_bias(distances(time, k.shape[2]), q.shape[-1])
        y = attention(q, k, v, scale, bias)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


class Alibi(Attention):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads, bias=True)

    def scale_and_bias(self, distance, head_dim):
        return 1 / math.sqrt(head_dim), -slopes(self.num_heads)[:, None, None] * distance


# In T5 all layers share one table of biases, and the projections do not have biases.


class T5(Attention):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads, bias=False)
        self.table = nn.Parameter(torch.zeros(32, num_heads))

    def scale_and_bias(self, distance, head_dim):
        return 1.0, self.table[bucket(distance.clamp_min(0))].permute(2, 0, 1)


# ## Costs, and when to take them
#
# Training costs $T^2$ comparisons, a generated token $T$, and the state holds $2 D$ numbers a token and layer of width
# $D$: nothing changes beside plain attention. ALiBi does not have parameters, T5 has 32 a head. On our result page
# "sparse", a causal layer with ALiBi takes 0.96 times the time of PyTorch's attention without positions, with T5's
# biases 1.15 times.
#
# The papers: a model of 1.3 billion parameters with ALiBi, trained at 1,024 tokens, has at 2,048 tokens the perplexity
# of a sinusoidal model trained at 2,048, with 11 % less time and memory. On our page "extrapolation", models trained at
# 128 tokens read windows of up to 8,192. ALiBi goes from 1.84 to 1.80 bits per byte. T5 has 1.89 at 128, 1.98 at 256,
# and 6.80 at 8,192: the many keys of the last bucket share one bias, and together they may outweigh the near ones.
#
# Take ALiBi where texts are longer than in training. Do not take it where far tokens matter as much as near ones: its
# lines fade them out, and with slopes of 0 it would be exact attention without positions. At equal minutes on short
# windows, the page "quality" has 1.761 bits per byte for both, and 1.715 for `rope`.

# --- proof ---
# The library's layers with the same weights give the same outputs, gradients and streamed steps; 160 tokens reach T5's
# last bucket, and 6 heads need ALiBi's second series of slopes.


import proofs

import kinformer


def proof():
    for num_heads in (4, 6):
        print(f"alibi with {num_heads} heads")
        library = kinformer.layer("alibi", 48, num_heads=num_heads)
        exponents = library.state_dict()["inner.position.exponents"]
        names = {
            "inner.projection.qkv": "qkv",
            "inner.out": "out",
            "inner.position.exponents": lambda weights, numbers=exponents: numbers,
        }
        page = Alibi(48, num_heads)
        proofs.compare(page, library, names, torch.randn(2, 40, 48), page.step)
    print("t5")
    names = {
        "inner.projection.qkv.weight": "qkv.weight",
        "inner.out.weight": "out.weight",
        "inner.position.table": "table",
    }
    page = T5(32, 4)
    nn.init.normal_(page.table)
    proofs.compare(page, kinformer.layer("t5", 32, num_heads=4), names, torch.randn(2, 160, 32), page.step)


def train():
    return [proofs.train(lambda kind=kind: kind(64, 4), __file__, positions=False) for kind in (Alibi, T5)]


def draw(figure, models):
    """Biases of ALiBi's heads, learned biases of T5's heads, and both trained pages beyond their 128 tokens."""
    lines, steps, bits = figure.subplots(1, 3)
    distance = torch.arange(128)
    lines.plot(-(slopes(4)[:, None] * distance).T)
    lines.set(title="ALiBi", xlabel="distance", ylabel="bias", ylim=(-8, 0.5))
    steps.plot(models[1].layers[0].table.detach()[bucket(distance)])
    steps.set(title="T5, trained", xlabel="distance", xscale="symlog")
    for name, model in zip(("ALiBi", "T5"), models, strict=True):
        curve = proofs.bits_by_position(model, __file__, 384).view(-1, 64).mean(1)
        bits.plot(torch.arange(32, 384, 64), curve, label=name)
    bits.axvline(128, color="grey", linestyle=":")
    bits.set(title="bits per byte", xlabel="position")
    bits.margins(y=0.35)
    bits.legend()


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
