# # PaTH attention
#
# *Paper: Yang et al., PaTH Attention: Position Encoding via Accumulating Householder Transformations (2025), arXiv
# 2505.16381. Members: `path`. Measured: state_tracking.*
#
# **Problem.** Rotary positions turn a query and a key by their distance alone. What stands between the two tokens does
# not matter. So one layer cannot follow a state that every token may change: a bit that flips, or a variable that gets
# a new value.
#
# **Idea.** Each token $s$ owns a matrix, made of the token's input. The key of an earlier token passes through the
# matrices of all later tokens before a query meets it:
#
# $$ s_{ij} = \frac{1}{\sqrt{d}}\, q_i^T H_i H_{i-1} \cdots H_{j+1} k_j, \quad H_s = I - \beta_s w_s w_s^T $$
#
# $w_s$ is a unit vector, and $\beta_s = 2\,\sigma(b \cdot x_s + c)$ lies between 0 and 2. With $\beta_s = 0$ the token
# changes nothing. With $\beta_s = 1$ it erases the direction $w_s$ from all earlier keys. With $\beta_s = 2$ it is a
# reflection, a Householder matrix: the direction changes its sign. Products of reflections can count, which sums of
# angles that do not depend on the text cannot.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## First form: every key passes through the matrices
#
# A new token multiplies all earlier keys by its matrix. The product is cheap, because the matrix differs from the
# identity in one direction: $H k = k - \beta\, w\, (w \cdot k)$. Then the token adds its own key, and the query meets
# all keys as in plain attention. The state holds the changed keys, and the values. No later token is touched, so the
# layer is causal.


def recurrent(q, k, v, w, beta, state=None):
    """q, k, v, w [batch, heads, time, head_dim], beta [batch, heads, time] -> the shape of q, and the last state."""
    empty = q[:, :, :0]
    keys, values = state or (empty, empty)
    outputs = []
    for t in range(q.shape[2]):
        direction = w[:, :, t, None]
        keys = keys - beta[:, :, t, None, None] * (keys @ direction.mT) * direction
        keys, values = torch.cat([keys, k[:, :, t, None]], 2), torch.cat([values, v[:, :, t, None]], 2)
        weights = (q[:, :, t, None] @ keys.mT / math.sqrt(q.shape[-1])).softmax(-1)
        outputs.append(weights @ values)
    return torch.cat(outputs, 2), (keys, values)


# ## Second form: all tokens at once
#
# A product of such matrices has a short form, as in the delta rule. For the tokens $j+1 \ldots i$ it is the identity
# minus a sum of outer products, whose coefficients solve one triangular system for all $j$ and $i$:
#
# $$ Z = (I + \mathrm{diag}(\beta)\, \mathrm{tril}(W W^T, -1))^{-1}\, \mathrm{diag}(\beta)\, \mathrm{tril}(W K^T, -1) $$
#
# $$ S = \mathrm{tril}(Q K^T) - \mathrm{tril}(Q W^T)\, Z $$
#
# Row $r$ and column $j$ of $\mathrm{tril}(W K^T, -1)$ are zero unless $r$ is later than $j$: a key passes through the
# matrices of later tokens only. The library takes blocks of 64 tokens, each with the keys before it, so that the
# triangular system stays small.


def parallel(q, k, v, w, beta):
    """The same function as a product of matrices."""
    time, beta = q.shape[2], beta[..., None]
    system = torch.eye(time, dtype=q.dtype) + beta * (w @ w.mT).tril(-1)
    z = torch.linalg.solve_triangular(system, beta * (w @ k.mT).tril(-1), upper=False)
    scores = (q @ k.mT - (q @ w.mT).tril() @ z) / math.sqrt(q.shape[-1])
    future = torch.ones(time, time, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


# ## The layer
#
# $w_s$ comes from a product of rank 32, a convolution over three tokens and SiLU, and is divided by its length. The low
# rank keeps the layer near the size of plain attention. The length matters: only a unit vector keeps the eigenvalue of
# $H_s$ between -1 and 1, so that keys never grow. Softmax stays the normalisation, so that the weights of a query sum
# to 1.
#
# The layer does not need other positions. Without them plain attention does not know the order of tokens; here each
# token between a key and a query leaves its mark.


class Attention(nn.Module):
    def __init__(self, dim, num_heads, rank=32):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)
        self.taps = nn.Parameter(torch.randn(3, dim) / 3)
        self.strength = nn.Linear(dim, num_heads)

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def project(self, x, recent):
        """q, k, v, w and beta of x [batch, time, dim]; recent [batch, 2, dim] are projections of the tokens before."""
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        tokens, time = torch.cat([recent, self.up(self.down(x))], 1), x.shape[1]
        w = F.silu(sum(self.taps[back] * tokens[:, 2 - back : 2 - back + time] for back in range(3)))
        beta = 2 * self.strength(x).sigmoid().transpose(1, 2)
        return (q, k, v, F.normalize(self.heads(w), dim=-1), beta), tokens[:, time:]

    def forward(self, x):
        parts, _ = self.project(x, x.new_zeros(len(x), 2, x.shape[2]))
        return self.out(parallel(*parts).transpose(1, 2).flatten(2))

    def step(self, x, state=None):
        """The same for the next tokens behind a state: keys, values and two projections for the convolution."""
        before, recent = state or (None, x.new_zeros(len(x), 2, x.shape[2]))
        parts, recent = self.project(x, recent)
        y, after = recurrent(*parts, before)
        return self.out(y.transpose(1, 2).flatten(2)), (after, recent)


# ## Costs, and when to take it
#
# In blocks, earlier keys cost three products where plain attention has two: the scores, the sum of values, and the keys
# behind the block. The backward pass of the library computes scores again. A generated token reads and writes every
# key, where plain attention only reads them. Keys and values of all tokens are stored, as in plain attention; our keys
# are float32, because each is changed once for every later token.
#
# With $\beta = 0$ the layer is exact softmax attention without positions.
#
# The paper claims that one layer can track states that rotary attention cannot, and better language models. On our page
# "state_tracking" (the parity of bits, one layer, 600 steps) it gets 71 % of the trained 16 tokens right, rotary
# positions get 56 %, and Gated DeltaNet with $\beta$ up to 2 gets 99 %; at 128 tokens both softmax layers guess. A
# short training does not find the solution that the layer could hold.
#
# Take it where the meaning of a token depends on what happened since: programs, games, entities that change. If speed
# counts, or the state must not grow, take `gated-deltanet`, which has the same matrices in a state of constant size.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.projection.qkv": "qkv",
        "inner.directions.0": "down",
        "inner.directions.1": "up",
        "inner.convolution.weight": lambda weights: weights["taps"].unflatten(-1, (4, -1)),
        "inner.strength": "strength",
        "inner.out": "out",
    }
    page = Attention(32, 4)
    proofs.compare(page, kinformer.layer("path", 32, num_heads=4), names, torch.randn(2, 40, 32), page.step)


def train():
    return proofs.train(lambda: Attention(64, 4), __file__, positions=False)


def draw(figure, model):
    """How much each token changes earlier keys, and how far a key has moved when later tokens have passed."""
    strengths, moved, bits = figure.subplots(1, 3)
    text = b"a key meets every later token."
    layer = model.layers[0]
    with torch.no_grad():
        x = model.norms[0](model.embed(torch.tensor(list(text))[None]))
        (_, k, _, w, beta), _ = layer.project(x, x.new_zeros(1, 2, x.shape[2]))
        strengths.imshow(beta[0].T, vmin=0, vmax=2, aspect="auto")
        strengths.set(title="beta (0: keeps, 2: reflects)", xlabel="head")
        head = beta[0].mean(-1).argmax()
        keys, rows = k[0, head, :0], []
        for t in range(len(text)):
            u = w[0, head, t]
            keys = torch.cat([keys - beta[0, head, t] * torch.outer(keys @ u, u), k[0, head, t, None]])
            alike = F.cosine_similarity(keys, k[0, head, : t + 1], dim=-1)
            rows.append(F.pad(alike, (0, len(text) - t - 1), value=float("nan")))
    image = moved.imshow(torch.stack(rows), vmin=-1, vmax=1, cmap="coolwarm")
    figure.colorbar(image, ax=moved, shrink=0.6)
    moved.set(title="cosine to the first key", xlabel="key", ylabel="query")
    for axes in (strengths, moved):
        axes.set_yticks(range(len(text)), text.decode().replace(" ", "_"), fontsize=6)
    bits.plot(torch.arange(32, 384, 64), proofs.bits_by_position(model, __file__, 384).view(-1, 64).mean(1))
    bits.axvline(128, color="grey", linestyle=":")
    bits.margins(y=1)
    bits.set(title="bits per byte", xlabel="position")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
