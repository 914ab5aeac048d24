# # Product-key memory: a million values for the price of a thousand keys
#
# *Paper: Lample, Sablayrolles, Ranzato, Denoyer, Jégou: Large Memory Layers with Product Keys (2019), arXiv 1907.05242.
# Members: `pkm`. Measured: causal_members, quality.*
#
# **Problem.** More weights let a model know more, but in a feed-forward network every token computes with every weight.
# A network is a memory of keys and values, $W_2\, f(W_1 x)$; most keys do not match, and still are multiplied.
#
# **Idea.** Give each token only its best $n$ of a million keys, and find them without a million products: build the
# keys as pairs of half keys, one from a first set of 1,000 and one from a second. A score is a sum of two halves,
#
# $$ s_{(i, j)} = q_1 \cdot a_i + q_2 \cdot b_j, \quad
# y = \sum_{(i, j) \in N} \mathrm{softmax}_N(s)_{(i, j)}\, v_{(i, j)} $$
#
# so the best pairs are made of the best halves, and 2,000 products find the best of a million keys.

import math

import torch
from torch import nn

# ## The search
#
# The search is exact. If $i$ is not among the $n$ best of the first set, then $n$ other halves with the same $j$ give
# better pairs, so $(i, j)$ is not among the best $n$ pairs. It suffices to compare the $n^2$ pairs of the best halves.


def search(q1, q2, a, b, n):
    """q1, q2 [..., half], a, b [keys, half] -> the n best scores, and their numbers i * keys + j, both [..., n]."""
    best1, i = (q1 @ a.T).topk(min(n, len(a)))
    best2, j = (q2 @ b.T).topk(min(n, len(b)))
    pairs = (best1[..., :, None] + best2[..., None, :]).flatten(-2)
    numbers = (i[..., :, None] * len(b) + j[..., None, :]).flatten(-2)
    scores, chosen = pairs.topk(n)
    return scores, numbers.gather(-1, chosen)


# The same by all pairs, to compare:


def search_all(q1, q2, a, b, n):
    scores = (q1 @ a.T)[..., :, None] + (q2 @ b.T)[..., None, :]
    return scores.flatten(-2).topk(n)


# ## The memory
#
# Several heads ask one table of values, each with separate queries and half keys, and their answers are added. The
# softmax runs over the chosen values alone, so weights sum to 1 however many were chosen.
#
# A value learns only when it is chosen, and in the beginning a few keys win all queries. So queries are normalised. The
# paper uses a batch norm, whose statistics spread the queries over the keys; but then an output depends on other tokens
# of the batch, later ones too, and causality is lost while training. A layer norm of each half looks at one token
# alone.


class ProductKeys(nn.Module):
    def __init__(self, dim, num_heads, keys, n, key_dim):
        super().__init__()
        self.num_heads, self.n, half = num_heads, n, key_dim // 2
        self.query, self.norm = nn.Linear(dim, num_heads * key_dim), nn.LayerNorm(half)
        self.keys = nn.Parameter(torch.empty(num_heads, 2, keys, half).uniform_(-(half**-0.5), half**-0.5))
        self.values = nn.Embedding(keys**2, dim)
        nn.init.normal_(self.values.weight, std=dim**-0.5)

    def forward(self, x, search=search):
        """x [..., dim] -> the same shape."""
        q = self.norm(self.query(x).unflatten(-1, (self.num_heads, 2, -1)))
        y = torch.zeros_like(x)
        for head in range(self.num_heads):
            scores, numbers = search(q[..., head, 0, :], q[..., head, 1, :], *self.keys[head], self.n)
            y = y + (scores.softmax(-1)[..., None] * self.values(numbers)).sum(-2)
        return y


# ## The layer
#
# The memory takes the place of the feed-forward network in one or two layers of a model. Attention is ordinary, with
# rotary positions: the features $i$ and $i + d/2$ of queries and keys are turned by the angle position times
# $10000^{-2i/d}$, so that their product depends on the distance. While generating, keys and values of attention are
# stored; the memory stores nothing, because each token looks up alone.


def rotate(x, start):
    """x [batch, heads, time, head_dim] at the positions from start on -> the same shape."""
    half = x.shape[-1] // 2
    angles = (start + torch.arange(x.shape[2]))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    def __init__(self, dim, num_heads, memory):
        super().__init__()
        self.num_heads, self.memory = num_heads, memory
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        start = 0 if state is None else state[0].shape[2]
        q, k = rotate(q, start), rotate(k, start)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + start)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.memory(self.norm2(x)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# With $K$ half keys of $d_q / 2$ numbers, a head makes $K d_q$ products to score $K^2$ keys, compares $n^2$ sums, and
# reads $n$ values. The paper's memory has $K = 512$, or 262,144 values, four heads and $n = 32$: a head computes 512 x
# 256 products and reads 32 values, where a plain search would take 262,144 x 256. The price is memory: all values, and
# the optimiser's two averages of each. Most values have no gradient in a step, so they take a separate optimiser for
# sparse gradients.
#
# With $n = K^2$ the memory is exact softmax attention of the token to all $K^2$ keys. With values of 0 the layer has
# attention alone.
#
# The paper claims that 12 layers with one memory beat 24 layers without, at half the time. Our result page
# "causal_members" gives each member as many parameters, so that the memory has few values: then it makes no difference,
# 2.073 bits per byte in 1.5 minutes beside 2.071 of the plain decoder, at 465 steps beside 760. A step takes 1.6 times
# the time: look-ups are slow where products are small. "quality" finds 1.747 and 1.732 in more minutes.
#
# Take it where a model should know more without computing more per token. Do not take it where memory for weights and
# optimiser is short. A mixture of experts (`mixtral`) is the coarser alternative: few large pieces instead of many
# small ones.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.mixer_residual.norm": "norm1",
        "inner.mixer.projection.qkv": "qkv",
        "inner.mixer.out": "out",
        "inner.feed_forward_residual.norm": "norm2",
        "inner.feed_forward": "memory",
    }
    for keys, n in ((16, 4), (4, 16), (8, 1)):
        print(f"{n} of {keys**2} values")
        page = Layer(32, 4, ProductKeys(32, 4, keys, n, 12))
        sizes = {"num_keys": keys, "topk": n, "key_dim": 12, "sparse": False}
        settings = {f"feed_forward.{name}": value for name, value in sizes.items()}
        library = kinformer.layer("pkm", 32, num_heads=4, whole=True, set=settings)
        x = torch.randn(2, 30, 32)
        proofs.compare(page, library, names, x, page.step)
        proofs.equal("a search of all pairs", page.memory(x, search_all), page.memory(x))


class Block(Layer):
    """The layer without its shortcut, which the shared model of training has."""

    def forward(self, x):
        return super().forward(x) - x


def train():
    return proofs.train(lambda: Block(64, 4, ProductKeys(64, 2, 32, 8, 32)), __file__)


def draw(figure, model):
    """The values that a text uses, as pairs of half keys, and the products that the search saves."""
    text = torch.tensor(list(b"a value learns only when it is chosen, and in the beginning few keys win. " * 4))[
        None, :128
    ]
    seen = []
    memory = model.layers[1].memory
    memory.norm.register_forward_hook(lambda _, inputs, q: seen.append(q))
    with torch.no_grad():
        model(text)
        for head, axes in enumerate(axes_of := figure.subplots(1, 3, width_ratios=(1, 1, 1.3))[:2]):
            q = seen[0][0, :, head]
            scores, numbers = search(q[:, 0], q[:, 1], *memory.keys[head], 8)
            used = torch.zeros(32 * 32).index_add(0, numbers.flatten(), scores.softmax(-1).flatten())
            axes.imshow(used.view(32, 32).clamp(max=3), cmap="magma")
            axes.set(title=f"use of values, head {head}", xlabel="second half key")
    axes_of[0].set_ylabel("first half key")
    right, sizes = figure.axes[2], torch.tensor([16, 64, 256, 1024])
    right.loglog(sizes**2, sizes**2, marker="o", label="all keys")
    right.loglog(sizes**2, sizes, marker="o", label="product keys")
    right.set(title="scores of whole keys", xlabel="values", ylabel="computed for a token")
    right.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
