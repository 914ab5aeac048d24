# # Differential attention: subtract the noise
#
# *Paper: Ye et al., Differential Transformer (2024), arXiv 2410.05258. Members: `differential`. Measured: modern_parts,
# modern_lengths.*
#
# **Problem.** A softmax gives every key a weight above 0. In a long text a few keys matter, and the small weights of
# all others add up to noise, which the output carries.
#
# **Idea.** Compute two attention maps and subtract one from the other, as a differential amplifier subtracts two wires
# to cancel the hum in both:
#
# $$ y = (\mathrm{softmax}(\frac{q_1 k_1^\top}{\sqrt{d}}) - \lambda \, \mathrm{softmax}(
# \frac{q_2 k_2^\top}{\sqrt{d}})) \, v $$
#
# Weight that both maps give to a key disappears. The difference may be 0 or negative, which a softmax cannot be.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Pairs of heads
#
# Two heads form a pair and share one value of twice their width, so parameters and the number of projected features
# stay as in plain attention. Head $i$ is paired with head $i + H / 2$, as in released models (DiffLlama). In the paper
# partners stand side by side, which is the same function with another order of the rows.
#
# Each map is a softmax with the usual division by $\sqrt{d}$, so the weights of a row sum to 1 in each, and to $1 -
# \lambda$ in the difference. Positions are rotary: queries and keys are rotated before the two maps, features $i$ and
# $i + d/2$ as a pair.


def rotate(x, start):
    """Rotate x [batch, heads, time, head_dim], whose first token stands at position ``start``."""
    width = x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(start, start + x.shape[2])[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def maps(q, k):
    """q [batch, heads, time, head_dim], k [batch, heads, start + time, head_dim] -> a softmax for each head."""
    start = k.shape[2] - q.shape[2]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(start + 1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def difference(q, k, lam):
    first, second = maps(q, k).chunk(2, 1)
    return first - lam * second


# ## The factor
#
# $\lambda$ is learned for each layer, in a form that begins near a chosen number and has gradients of a useful size:
#
# $$ \lambda = \exp(a \cdot b) - \exp(c \cdot d) + \lambda_0, \quad \lambda_0 = 0.8 - 0.6 \, e^{-0.3 l} $$
#
# The vectors $a$ to $d$ have the width of a head and begin as $N(0, 0.1)$, so both exponentials begin near 1 and
# cancel. $\lambda_0$ is 0.2 in the first layer, $l = 0$, and approaches 0.8 in deep ones: the deeper, the more is
# subtracted.


def initial(layer):
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


# ## Why the heads are normalised
#
# The size of a difference varies from head to head: weights of a row sum to $1 - \lambda$, and a head that subtracts
# much is small. So each pair's output is divided by its root mean square, without weights, before the heads are mixed.
# The factor $1 - \lambda_0$ keeps the outputs, and with them gradients, at the size that plain attention would give, so
# hyper-parameters of plain models fit.
#
# The state is the pair (rotated k, v) of all heads, as in plain attention: one row a token. Both maps are causal by the
# same mask, and nothing else mixes tokens.


class Attention(nn.Module):
    def __init__(self, dim, num_heads, layer=0):
        super().__init__()
        self.num_heads, self.initial = num_heads, initial(layer)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.vectors = nn.Parameter(0.1 * torch.randn(4, dim // num_heads))

    def lam(self):
        a, b, c, d = self.vectors
        return (a @ b).exp() - (c @ d).exp() + self.initial

    def project(self, x, state=None):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        start = 0 if state is None else state[0].shape[2]
        q, k = rotate(q, start), rotate(k, start)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        return q, k, v

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, v = self.project(x, state)
        pairs = torch.cat(v.chunk(2, 1), -1)  # [batch, heads / 2, keys, 2 head_dim]
        y = difference(q, k, self.lam()) @ pairs
        y = F.rms_norm(y, y.shape[-1:], eps=1e-5) * (1 - self.initial)
        return self.out(y.transpose(1, 2).flatten(2)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# The two maps need as many scores as $H$ plain heads. The page subtracts the maps before the product with the values. A
# fused kernel, which never holds a map, has to multiply both maps with values of twice the width, so it does 1.5 times
# the work of plain attention: $1.5 \, T^2$ in training, $1.5 \, T$ for a generated token. The state holds $2 D$ numbers
# a token and layer of width $D$, and $\lambda$ adds $4 d$ parameters a layer. With $\lambda = 0$ it is softmax
# attention of half as many heads, with values of twice the width and a norm.
#
# Our result page "modern_lengths" measures 1.81 times the time of plain attention for a layer at 32,768 tokens, and
# 34.5 ms instead of 11.1 for the token after them. The paper claims the quality of a Transformer with 65 % of its
# parameters or of its training tokens, and better retrieval from long contexts. On "modern_parts", after a minute of
# training, it is behind its plain twin by 0.101 ± 0.023 bits per byte (2.107 and 2.006), at 555 steps instead of 590:
# so early, the gain does not show. Take it where a few relevant tokens stand among many others and attention to all of
# them is affordable. Do not take it where speed counts.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps, in the first layer and
# deeper.


import proofs

import kinformer


def proof():
    names = {"inner.projection.qkv": "qkv", "inner.out": "out", "inner.differential.vectors": "vectors"}
    for layer in (0, 3):
        print(f"layer {layer}")
        page = Attention(32, 4, layer)
        nn.init.normal_(page.vectors, std=0.5)
        library = kinformer.layer("differential", 32, num_heads=4, differential=initial(layer))
        proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)


def train():
    return proofs.train(lambda: Attention(64, 4), __file__, positions=False)


def draw(figure, model):
    """Both maps of one trained pair of heads, and their difference: red is positive, blue negative."""
    text = b"the noise that both maps have in common disappears"
    layer = model.layers[1]
    with torch.no_grad():
        x = model.embed(torch.tensor(list(text))[None])
        x = x + model.layers[0](model.norms[0](x))
        x = x + model.feed[0](model.norms[1](x))
        q, k, _ = layer.project(model.norms[2](x))
        first, second = maps(q, k)[0, 0], maps(q, k)[0, 2]
        lam = layer.lam().item()
        shown = (
            ("first map", first),
            (f"second map ($\\lambda$ = {lam:.2f})", second),
            ("difference", first - lam * second),
        )
        for axes, (title, weights) in zip(figure.subplots(1, 3), shown, strict=True):
            axes.imshow(weights, cmap="RdBu_r", vmin=-0.3, vmax=0.3)
            axes.set(title=title, xlabel="key", ylabel="query" if title == "first map" else "")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
