# # Rotary positions
#
# *Paper: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021), arXiv 2104.09864; longer
# texts: Peng et al., YaRN (2023), arXiv 2309.00071. Members: `rope`. Measured: minutes_positions, extrapolation.*
#
# **Problem.** Attention compares a query with a set of keys: without help it cannot tell "dog bites man" from "man
# bites dog". A learned vector for each position, added to the token, ends at the last position of the table, and it
# tells attention where a token stands, although the distance between two tokens is what usually matters.
#
# **Idea.** Take the features of a query or a key in pairs, and read each pair as a complex number. Rotate it by an
# angle that grows with the position, $q_m \to q_m e^{i m \theta}$ and $k_n \to k_n e^{i n \theta}$. In the product of a
# query and a key the two positions cancel except for their difference:
#
# $$ \mathrm{Re}[\, q_m e^{i m \theta}\, \overline{k_n e^{i n \theta}} \,]
# = \mathrm{Re}[\, q_m \overline{k_n}\, e^{i (m - n) \theta} \,] $$

import math

import torch
from torch import nn

# ## The angles
#
# A head of width $d$ has $d / 2$ pairs. Pair $i$ turns by $\theta_i$ radians a token:
#
# $$ \theta_i = 10000^{-2 i / d}, \quad i = 0, 1, \ldots, d / 2 - 1 $$
#
# The first pair turns once in 6.3 tokens and separates neighbours. The last pair of a head of 64 turns once in 47,000
# tokens, so it hardly moves within a text: it compares contents. The angles are computed in float64. In float32 the
# angle at position $10^6$ would be off by 0.06 radians.


def rates(width, base=10000.0):
    """Return the radians per token of each pair, [width / 2]."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


# ## The rotation
#
# Features 2i and 2i + 1 form a pair, as in the paper. Llama and GPT-NeoX pair feature i with feature i + d/2. Both are
# the same function of differently sorted rows of the projection, so a checkpoint of one layout gives nonsense in the
# other.


def as_complex(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def rotate(x, rates, start=0, magnitude=1.0):
    """Rotate x [batch, heads, time, head_dim], whose first token stands at position ``start``."""
    angles = torch.arange(start, start + x.shape[2])[:, None] * rates
    pairs = as_complex(x)
    turns = torch.polar(torch.full_like(angles, magnitude), angles)
    return torch.view_as_real(pairs * turns.to(pairs.dtype)).flatten(-2)


# The right side of the formula says the same with distances. It needs an angle for every pair of tokens and is here to
# show that no position is left in the scores. A shift of the whole text changes nothing.


def scores_by_distance(q, k, rates):
    """Return the scores [batch, heads, time, time] of q and k before their rotation."""
    place = torch.arange(q.shape[2])
    angles = (place[:, None] - place)[..., None] * rates
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.einsum("bhmi,bhni,mni->bhmn", as_complex(q), as_complex(k).conj(), turns).real


# ## Attention, and the cached step
#
# Values are not rotated: a token's content should arrive the same from everywhere. The rest is softmax attention, with
# the division by $\sqrt{d}$ that keeps scores at a standard deviation near 1. A rotation does not change the length of
# a vector, so the usual scale stays right.
#
# The rotation of a key depends on its own position only. So keys are rotated once, when they arrive, and the state is
# the pair (rotated k, v). It grows by one row a token. Causality is the mask's work alone: later tokens are hidden, and
# a rotation looks at one token only.


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.magnitude = num_heads, 1.0
        self.rates = rates(dim // num_heads)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        start = 0 if state is None else state[0].shape[2]
        q, k = (rotate(one, self.rates, start, self.magnitude) for one in (q, k))
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(start + 1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, time, dim)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## Longer texts than in training
#
# Beyond the trained length $L$ the slow pairs reach angles that the model has never seen. Three remedies change the
# rates for texts of $s L$ tokens. Interpolation divides all rates by $s$, and neighbours come too close together. The
# NTK-aware base, $10000 s^{d / (d - 2)}$, divides the slowest rate by $s$ and keeps the fastest. YaRN keeps the pairs
# that turn 32 times or more within $L$, divides the pairs that turn once or less, and blends between. (The paper's
# blend is linear in the number of turns. Its code is linear in the pair's index, and checkpoints follow the code.) It
# also multiplies rotated queries and keys by $0.1 \ln s + 1$, which sharpens a softmax over more keys.


def interpolated(width, factor):
    return rates(width) / factor


def ntk(width, factor):
    return rates(width, 10000.0 * factor ** (width / (width - 2)))


def yarn(width, factor, length, fast=32, slow=1):
    def pair(turns):  # the index of the pair that turns so many times within the trained length
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(10000.0))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), width - 1)
    share = ((torch.arange(width // 2) - low) / (max(high, low + 0.001) - low)).clamp(0, 1)
    return rates(width) * (1 - share) + rates(width) / factor * share


# ## Costs, and when to take it
#
# A rotation costs $4 D$ multiplications a token, where the projections of a layer of width $D$ cost $4 D^2$, and it
# does not have parameters. Training costs $T^2$ comparisons, a generated token $T$, and the state holds $2 D$ numbers a
# token and layer. With all rates 0 it is exact attention without positions.
#
# The paper reports 27.5 BLEU on WMT14 English to German, where the Transformer with sinusoids has 27.3. On our result
# page "minutes_positions", rotary positions win 0.08 bits per byte over learned ones after the same 850 steps (2.164
# and 2.245). Take it as the default of a new decoder. It does not extrapolate by itself. On the page "extrapolation", a
# model trained at 128 tokens has 1.79 bits per byte at 128 tokens, 1.82 at 256, 2.12 at 512 and 4.41 at 8,192; YaRN
# without further training has 1.97 at 512 and 3.38 at 8,192; interpolation without further training fails at once, with
# 3.15 at
# 256. If a model must run beyond its training without any tuning, take `alibi`.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps, also with other rates.


import proofs

import kinformer

NAMES = {"inner.projection.qkv": "qkv", "inner.out": "out"}


def proof():
    sharper = 0.1 * math.log(4) + 1
    settings = {
        "none": ({}, rates(8), 1.0),
        "linear": ({"position.factor": 4.0}, interpolated(8, 4), 1.0),
        "ntk": ({"position.factor": 4.0}, ntk(8, 4), 1.0),
        "yarn": ({"position.factor": 4.0, "position.original_length": 64}, yarn(8, 4, 64), sharper),
    }
    for name, (values, turns, magnitude) in settings.items():
        print(f"scaling {name}")
        page = Attention(32, 4)
        page.rates, page.magnitude = turns, magnitude
        library = kinformer.layer("rope", 32, num_heads=4, set={"position.scaling": name, **values})
        proofs.compare(page, library, NAMES, torch.randn(2, 40, 32), page.step)
    q, k = torch.randn(2, 1, 2, 20, 8)
    rotated = rotate(q, rates(8), start=1000) @ rotate(k, rates(8), start=1000).mT
    assert torch.allclose(rotated, scores_by_distance(q, k, rates(8)))


def train():
    return proofs.train(lambda: Attention(64, 4), __file__, positions=False)


def draw(figure, model):
    """Turns of the pairs of a head of 64, the product of two equal vectors, and the page beyond its 128 tokens."""
    angle, product, bits = figure.subplots(1, 3)
    turns = (torch.arange(256)[:, None] * rates(64)).cos()
    angle.imshow(turns.T, aspect="auto", cmap="RdBu", interpolation="nearest")
    angle.set(title="cosine of the angle", xlabel="position", ylabel="pair of features")
    product.plot(turns.mean(1))
    product.set(title="product of equal vectors", xlabel="distance", ylim=(0, 1))
    for name, turns, magnitude in (
        ("trained", rates(16), 1.0),
        ("interpolated", interpolated(16, 4), 1.0),
        ("YaRN", yarn(16, 4, 128), 0.1 * math.log(4) + 1),
    ):
        for layer in model.layers:
            layer.rates, layer.magnitude = turns, magnitude
        curve = proofs.bits_by_position(model, __file__, 384).view(-1, 64).mean(1)
        bits.plot(torch.arange(32, 384, 64), curve, label=name)
    bits.axvline(128, color="grey", linestyle=":")
    bits.set(title="bits per byte", xlabel="position")
    bits.margins(y=0.6)
    bits.legend(fontsize=8, loc="upper left")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
