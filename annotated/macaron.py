# # Half steps around attention: Macaron Net
#
# *Paper: Lu et al., Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View (2019),
# arXiv 1906.02762. Members: `macaron`. Measured: quality.*
#
# **Problem.** A layer applies attention and then a feed-forward. Why in this order, and why once each? The paper reads
# the tokens as particles: attention lets them interact, and the feed-forward moves each one alone. A layer is then one
# step of a numerical solver of the differential equation
#
# $$ \frac{d x_i}{d t} = F(x_i, t) + G(x_i, \{x_1, \ldots, x_n\}, t) $$
#
# A full step of $G$ followed by a full step of $F$ is Lie-Trotter splitting, whose error in a step of size $\gamma$ is
# of the order $\gamma^2$.
#
# **Idea.** Split symmetrically. Half a step of $F$, a full step of $G$ and another half step of $F$ (Strang splitting)
# have an error of the order $\gamma^3$ at the price of one more call of $F$. As a layer: a feed-forward of half weight,
# attention, and a second feed-forward of half weight.
#
# $$ x' = x + \frac{1}{2} F_1(x), \quad x'' = x' + G(x'), \quad y = x'' + \frac{1}{2} F_2(x'') $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The two splittings
#
# The claim can be tried on an equation with a known solution, $x' = (A + B) x$ with two matrices. A step by either
# matrix alone is exact, $e^{\gamma A} x$, so the whole error is the splitting's. The picture of this page shows both
# errors: halving the step divides one by 4, the other by 8.


def lie_trotter(x, a, b, size):
    return torch.matrix_exp(size * a) @ (torch.matrix_exp(size * b) @ x)


def strang(x, a, b, size):
    return torch.matrix_exp(size / 2 * a) @ (torch.matrix_exp(size * b) @ (torch.matrix_exp(size / 2 * a) @ x))


# ## The parts
#
# Attention is softmax attention, whose division by $\sqrt{d}$ keeps scores at a standard deviation near 1. Only
# attention mixes tokens, so only its mask keeps the layer causal, and only its keys and values are stored: the state is
# the pair (k, v), one row a token, as in the standard layer. A second feed-forward does not add to it.


def attention(q, k, v):
    """q [batch, heads, time, head_dim], k and v [batch, heads, start + time, head_dim] -> the shape of q."""
    start = k.shape[2] - q.shape[2]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(start + 1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


# ## The layer
#
# Each feed-forward is half as wide as usual, $2 D$ instead of $4 D$, so a layer has as many weights as the standard one
# and costs as much. Each of the three sublayers has its own norm. The paper's translation models put the norm before
# the sublayer, which keeps the shortcut free, and so does this page.


class Layer(nn.Module):
    def __init__(self, dim, num_heads, hidden=None):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.first, self.second = FeedForward(dim, hidden or 2 * dim), FeedForward(dim, hidden or 2 * dim)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def interact(self, x, state):
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        return self.out(attention(q, k, v).transpose(1, 2).reshape(batch, time, dim)), (k, v)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        x = x + self.first(self.norm1(x)) / 2
        y, state = self.interact(self.norm2(x), state)
        x = x + y
        return x + self.second(self.norm3(x)) / 2, state

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# | | standard layer | Macaron layer |
# | --- | --- | --- |
# | weights, width D | $12 D^2$ | $12 D^2$ |
# | attention, T tokens | $T^2$ | $T^2$ |
# | sublayers and norms | 2 | 3 |
# | state of a token | $2 D$ | $2 D$ |
#
# With a first feed-forward of zeros and a second one twice as large, it is the standard layer. The same step fits any
# mixer, in encoders and decoders. The second feed-forward of a layer and the first of the next one stand side by side,
# so only the ends of the stack differ in kind: feed-forwards are cut in two and interleaved with attention more finely.
#
# The paper reports 28.9 BLEU for the base size and 30.2 for the big one on WMT14 English to German, and 35.4 on IWSLT14
# German to English. Our result page "quality", at equal minutes, has 1.782 bits per byte, between `post-ln` with 1.786
# and `gpt` with 1.732: the third sublayer costs time, and at this size the order of the error did not pay for it.
# (Those members also differ in positions.) The theory is about small steps of one equation, whereas every trained layer
# has different weights and takes a step as large as it likes. Take it to compare wirings of a layer.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps; and each splitting has
# the order that the page claims.


import proofs

import kinformer


def proof():
    names = {
        "inner.first_residual.norm": "norm1",
        "inner.first_feed_forward": "first",
        "inner.mixer_residual.norm": "norm2",
        "inner.mixer.projection.qkv": "qkv",
        "inner.mixer.out": "out",
        "inner.feed_forward_residual.norm": "norm3",
        "inner.feed_forward": "second",
    }
    page = Layer(32, 4)
    library = kinformer.layer("macaron", 32, num_heads=4, whole=True, set={"feed_forward.hidden_dim": 64})
    proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)
    for split, order in ((lie_trotter, 2), (strang, 3)):
        errors = splitting_errors(split, [0.02, 0.01])
        assert abs(math.log2(errors[0] / errors[1]) - order) < 0.1


def splitting_errors(split, sizes):
    """Return the error of one step of each size, for two random matrices of width 8."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    x = torch.ones(8, dtype=torch.float64)
    return [(split(x, a, b, size) - torch.matrix_exp(size * (a + b)) @ x).norm().item() for size in sizes]


def train():
    return proofs.train(lambda: Layer(64, 4), __file__)


def draw(figure, model):
    """Left: the error of a step, by its size. Right: how far each sublayer of the trained page moves the tokens."""
    errors, moves = figure.subplots(1, 2)
    sizes = [2.0**-power for power in range(2, 9)]
    for name, split in (("F, then G (Lie-Trotter)", lie_trotter), ("F/2, G, F/2 (Strang)", strang)):
        errors.loglog(sizes, splitting_errors(split, sizes), marker=".", label=name)
    errors.set(title="error of one step", xlabel="size of the step")
    errors.legend()
    x = model.embed(torch.tensor(list(b"half a step, a meeting, half a step"))[None])
    lengths = []
    with torch.no_grad():
        for layer in model.layers:
            for name in ("first", "interact", "second"):
                if name == "interact":
                    y = layer.interact(layer.norm2(x), None)[0]
                else:
                    norm = layer.norm1 if name == "first" else layer.norm3
                    y = getattr(layer, name)(norm(x)) / 2
                lengths.append((y.norm(dim=-1) / x.norm(dim=-1)).mean().item())
                x = x + y
    colours = ["tab:blue", "tab:orange", "tab:blue"] * len(model.layers)
    moves.bar(range(len(lengths)), lengths, color=colours)
    moves.set_xticks(range(len(lengths)), ["F/2", "G", "F/2"] * len(model.layers))
    moves.set(title="length of the move / length of x", xlabel="sublayers of two layers")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
