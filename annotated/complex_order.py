# # Word order as phase: complex-valued tokens
#
# *Paper: Wang et al., Encoding word order in complex embeddings (2020), arXiv 1912.12333. Members: `complex-order`.
# Measured: quality, minutes_members.*
#
# **Problem.** A token vector plus a position vector is a sum of two unrelated things: moving a word changes its vector
# in the same way for all words. Order may matter more for "not" than for "the", and the sum cannot say so.
#
# **Idea.** Make every feature of a token a wave over the positions. Token $j$ at position $p$ has complex features.
# Their lengths carry its meaning, their angles its position:
#
# $$ x_{j, p} = r_j \odot e^{i \omega_j p} $$
#
# Each token learns amplitudes $r_j$ and frequencies $\omega_j$. Moving a token by $n$ places multiplies it by $e^{i
# \omega_j n}$, wherever it stood: the authors derive the form from this demand. A token with frequency 0 ignores its
# position.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The embedding
#
# The frequencies begin as the waves of the sinusoidal encoding, the same for all tokens, $\omega_k = 10000^{-2 \lfloor
# k / 2 \rfloor / d}$ for feature $k$ of $d$ complex ones. The page learns offsets from there, so that weight decay does
# not pull frequencies to 0. The paper also allows a first phase for each feature, but its ablation finds that it hurts.
# Angles are computed in float64, because a float32 angle of $10^6$ radians is off by 0.06.


class Embedding(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.amplitude = nn.Embedding(vocab, width)
        self.offset = nn.Parameter(torch.zeros(vocab, width))
        feature = torch.arange(width, dtype=torch.float64)
        self.first = 10000.0 ** (-2 * (feature / 2).floor() / width)

    def forward(self, tokens, start=0):
        """tokens [batch, time], the first at position ``start`` -> complex [batch, time, width]."""
        frequency = self.first + self.offset[tokens].double()
        angle = frequency * torch.arange(start, start + tokens.shape[1])[:, None]
        turn = torch.polar(torch.ones_like(angle), angle)
        amplitude = self.amplitude(tokens)
        return torch.complex(amplitude * turn.real.to(amplitude.dtype), amplitude * turn.imag.to(amplitude.dtype))


# ## Real weights for complex numbers
#
# Products, norms and feed-forwards have real weights, which real and imaginary parts share. A real product keeps the
# angle of a single wave. A norm or a ReLU changes it, so deeper layers work on mixtures.


def both(module, z):
    return torch.complex(module(z.real), module(z.imag))


def modulus(z):
    return (z.real.square() + z.imag.square() + 1e-12).sqrt()  # the gradient of a bare root is infinite at 0


# ## Attention
#
# A softmax needs real scores, so the score is the modulus of the complex product of query and key. It is never
# negative: no key can be pushed below a score of 0.
#
# $$ s_{mn} = \frac{| \sum_c q_{mc} k_{nc} |}{\sqrt{d}}, \quad y_m = \sum_n p_{mn} v_n $$
#
# The authors do not conjugate the query. The angles of two waves of one frequency then add up, $e^{i \omega (m + n)}$,
# so the score depends on the sum of the positions. With a conjugate, as physicists multiply, it would depend on the
# distance $m - n$, as with rotary positions. The page and the library have both. Weights are real, and average the real
# and the imaginary parts of the values alike. The division by $\sqrt{d}$, with $d$ complex features, keeps first scores
# small.


def attention(q, k, v, conjugate=False):
    """q [batch, heads, time, head_dim], k and v [batch, heads, start + time, head_dim], all complex."""
    start = k.shape[2] - q.shape[2]
    product = (q.conj() if conjugate else q) @ k.transpose(-2, -1)
    scores = modulus(product) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(start + 1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.complex(weights @ v.real, weights @ v.imag)


# ## The layer, and the cached step
#
# The state holds the complex keys and values, and grows by one row a token. Their number is also the position of the
# next token. Later tokens are hidden by the mask; no other part mixes tokens, so the model is causal.


class Layer(nn.Module):
    def __init__(self, width, num_heads, hidden):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.conjugate = False

    def step(self, x, state=None):
        """x complex [batch, time, width] behind the tokens of the state -> the same shape, and the next state."""
        batch, time, width = x.shape
        heads = both(self.qkv, both(self.norm1, x)).view(batch, time, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        y = attention(q, k, v, self.conjugate).transpose(1, 2).reshape(batch, time, width)
        x = x + both(self.out, y)
        hidden = both(lambda part: F.gelu(self.up(part)), both(self.norm2, x))
        return x + both(self.down, hidden), (k, v)


# The lengths of the last complex numbers give real logits, by a product with the table of amplitudes. The authors
# divide the lengths by 1.5.


class Model(nn.Module):
    def __init__(self, vocab=256, width=32, depth=2, num_heads=4, hidden=128):
        super().__init__()
        self.embed, self.norm = Embedding(vocab, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList([Layer(width, num_heads, hidden) for _ in range(depth)])
        nn.init.normal_(self.embed.amplitude.weight, std=0.02)

    def step(self, tokens, states=None):
        states = states or [None] * len(self.layers)
        x, after = self.embed(tokens, 0 if states[0] is None else states[0][0].shape[2]), []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer.step(x, state)
            after.append(state)
        return modulus(both(self.norm, x)) / 1.5 @ self.embed.amplitude.weight.T, after

    def forward(self, tokens):
        return self.step(tokens)[0]


# ## Costs, and when to take it
#
# A complex number is two real ones, and a complex product is four. So beside a real model with as many weights,
# projections and sums of values cost twice as much and scores four times. Training computes $T^2$ scores, a generated
# token $T$. The state holds $4 d$ numbers a token and layer for $d$ complex features, instead of $2 d$. With
# frequencies and imaginary parts of 0 it is attention to the absolute value of the real product, without positions.
#
# The paper reports that a Transformer-XL of 6 layers on text8 improves from 1.29 to 1.26 bits per character, and
# translation from English to German (WMT16) from 34.5 to 35.8 BLEU. Our result page "quality" has 2.049 bits per byte
# after four minutes, where `rope` has 1.715 and a 5-gram 2.001; on "minutes_members" no other learning rate helps. Take
# it to study order as phase. Where quality for the money counts, take `rope`, which turns queries and keys by fixed
# frequencies.

# --- proof ---
# The library's model with the same weights gives the same logits, gradients and streamed steps, with both products.


import proofs

import kinformer


def proof():
    names = {"input.embedding.weight": "embed.amplitude.weight", "input.embedding.offset": "embed.offset"}
    for i in range(2):
        layer = f"stack.layers.{i}."
        names |= {
            f"{layer}mixer.projection.qkv.0": f"layers.{i}.qkv",
            f"{layer}mixer.out.parts.0": f"layers.{i}.out",
            f"{layer}feed_forward.inner.up": f"layers.{i}.up",
            f"{layer}feed_forward.inner.down": f"layers.{i}.down",
            f"{layer}mixer_residual.norm.inner": f"layers.{i}.norm1",
            f"{layer}feed_forward_residual.norm.inner": f"layers.{i}.norm2",
        }
    names = {f"inner.{there}": here for there, here in (names | {"norm.inner": "norm"}).items()}
    for conjugate in (False, True):
        print("conjugated" if conjugate else "not conjugated")
        page = Model(width=16, num_heads=2, hidden=64)
        nn.init.normal_(page.embed.amplitude.weight)
        nn.init.normal_(page.embed.offset, std=0.3)
        for layer in page.layers:
            layer.conjugate = conjugate
        library = kinformer.build("complex-order", recipe="tiny", set={"layers.*.mixer.score.conjugate": conjugate})
        proofs.compare(page, proofs.Whole(library), names, torch.randint(256, (2, 40)), page.step)


def train():
    return proofs.train(None, __file__, whole=Model)


def draw(figure, model):
    """Features of one trained token as waves, and products of the token with itself at two positions."""
    waves, added, subtracted = figure.subplots(1, 3)
    with torch.no_grad():
        x = model.embed(torch.full((1, 64), ord("e")))[0]
    size = x.real.abs().max().item()
    waves.imshow(x.real.T, aspect="auto", cmap="RdBu", vmin=-size, vmax=size, interpolation="nearest")
    waves.set(title='real part of "e"', xlabel="position", ylabel="feature")
    added.imshow(modulus(x @ x.T), vmin=0)
    added.set(title=r"$|x_m \cdot x_n|$", xlabel="n", ylabel="m")
    subtracted.imshow(modulus(x.conj() @ x.T), vmin=0)
    subtracted.set(title=r"$|\overline{x}_m \cdot x_n|$", xlabel="n")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
