# # Relative position representations
#
# *Paper: Shaw, Uszkoreit, Vaswani: Self-Attention with Relative Position Representations (2018), arXiv 1803.02155.
# Members: `shaw`. Measured: sparse, quality.*
#
# **Problem.** The first Transformers add a vector for each absolute position to the tokens. A model has to learn anew
# for every pair of positions that two tokens are neighbours, although "the word before" means the same everywhere in a
# text.
#
# **Idea.** Give attention the distance itself, as a learned vector. Each distance $r$ has a key $a^K_r$, which a query
# meets beside the token's key, and a value $a^V_r$, which is read with the token's value. Distances beyond $k$ are cut
# to $k$: far away, the exact place hardly matters, and texts may be longer than in training.
#
# $$ s_{ij} = \frac{q_i \cdot (k_j + a^K_{r})}{\sqrt{d}}, \quad
# y_i = \sum_j p_{ij} (v_j + a^V_{r}), \quad r = \max(-k, \min(k, j - i)) $$

import math

import torch
from torch import nn

# ## The distances
#
# Row $r + k$ of a table with $2 k + 1$ rows belongs to the distance $r$. The sign says on which side a key lies, which
# an encoder needs. A decoder sees keys with $r \le 0$ only, so the last $k$ rows of its tables are never read.


def rows(queries, keys, limit):
    """Return the row of the tables for each pair, [queries, keys]; the queries are the last of the keys."""
    start = keys - queries
    distance = torch.arange(keys) - torch.arange(start, keys)[:, None]
    return distance.clamp(-limit, limit) + limit


# ## First form: a vector for each pair
#
# This is the formula, word for word. It makes two tensors [time, time, head_dim] and is here because it is easy to
# check. The division by $\sqrt{d}$ holds for both terms, and keeps scores at a standard deviation near 1.


def attention_by_pairs(q, k, v, key_table, value_table):
    """q [batch, heads, time, head_dim], k and v [batch, heads, start + time, head_dim] -> the shape of q."""
    row = rows(q.shape[2], k.shape[2], len(key_table) // 2)
    keys = k[:, :, None] + key_table[row]  # [batch, heads, time, start + time, head_dim]
    scores = (q[:, :, :, None] * keys).sum(-1) / math.sqrt(q.shape[-1])
    weights = visible(scores).softmax(-1)
    return (weights[..., None] * (v[:, :, None] + value_table[row])).sum(3)


def visible(scores):
    """Hide later keys. Without this mask a query would read them, and their distance would even name them."""
    start = scores.shape[-1] - scores.shape[-2]
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(start + 1)
    return scores.masked_fill(future, -torch.inf)


# ## Second form: products with the tables
#
# The paper saves memory by splitting each sum. A query meets only $2 k + 1$ different vectors of distances, so it is
# multiplied with the table once, and each key picks its number from the row:
#
# $$ q_i \cdot (k_j + a^K_r) = q_i \cdot k_j + (q_i \cdot a^K)_r $$
#
# For the values, the weights of all keys of a distance are added up first, and the sums are multiplied with the table.
# No tensor has more than one number for each pair. Both forms agree exactly, so the page uses the second one.


def attention(q, k, v, key_table, value_table):
    """The same function as ``attention_by_pairs``."""
    row = rows(q.shape[2], k.shape[2], len(key_table) // 2).expand(*q.shape[:3], -1)
    scores = q @ k.mT + (q @ key_table.T).gather(-1, row)
    weights = visible(scores / math.sqrt(q.shape[-1])).softmax(-1)
    by_distance = weights.new_zeros(*weights.shape[:-1], len(value_table)).scatter_add(-1, row, weights)
    return weights @ v + by_distance @ value_table


# ## The layer, and the cached step
#
# The heads of a layer share its two tables; every layer has others. Tokens do not get any other positions.
#
# A token's key and value do not contain its position. So they can be stored: the state is the pair (k, v), and grows by
# one row a token. A new query makes its own row of distances.


class Attention(nn.Module):
    def __init__(self, dim, num_heads, limit=16):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        shape = (2 * limit + 1, dim // num_heads)
        self.key_table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.value_table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        y = attention(q, k, v, self.key_table, self.value_table)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# Training costs $T^2$ comparisons and two more passes over the pairs, for keys and for values by distance. A generated
# token costs $T$ comparisons and $2 k + 1$ more. The state holds $2 D$ numbers a token and layer of width $D$, the
# tables $2 (2 k + 1) d$ numbers a layer. With tables of zeros it is exact attention without positions.
#
# The paper reports 26.8 BLEU on WMT14 English to German for the base model, where sinusoids have 26.5, and 29.2 instead
# of 27.9 for the big one. In its ablation, limits from 2 to 256 differ little.
#
# On our result page "sparse", a causal layer takes 1.35 times the time of PyTorch's attention without positions, where
# a bias by distance takes 0.96 to 1.15 times. On "quality", after four minutes of training, it has 1.748 bits per byte,
# before `alibi` and `t5` with 1.761 and behind `rope` with 1.715. Take it to reproduce the first relative positions, or
# where a value should tell how far it lies back: no rotation and no bias does. For long texts take `rope` or `alibi`,
# which fast kernels know.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps, also with a limit that
# most pairs reach; and the page's two forms agree.


from pathlib import Path

import proofs

import kinformer


def proof():
    names = {
        "inner.projection.qkv": "qkv",
        "inner.out": "out",
        "inner.position.key_table": "key_table",
        "inner.position.value_table": "value_table",
    }
    for limit in (16, 4):
        print(f"distances up to {limit}")
        page = Attention(32, 4, limit)
        library = kinformer.layer("shaw", 32, num_heads=4, set={"position.max_distance": limit})
        proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)
    q, k, v = torch.randn(3, 2, 4, 20, 8)
    inputs = q[:, :, -5:], k, v, page.key_table, page.value_table
    assert torch.allclose(attention(*inputs), attention_by_pairs(*inputs))


def train():
    return proofs.train(lambda: Attention(64, 4), __file__, positions=False)


def draw(figure, model):
    """Left: how much each head of the first layer attends to each distance. Right: lengths of the learned vectors."""
    attended, lengths = figure.subplots(1, 2)
    layer = model.layers[0]
    with torch.no_grad():
        x = model.norms[0](model.embed(torch.tensor(list(Path(__file__).read_bytes()[:256]))[None]))
        q, k, _ = layer.qkv(x).view(1, 256, 3, 4, -1).permute(2, 0, 3, 1, 4)
        eye = torch.eye(256).expand(1, 4, -1, -1)
        weights = attention(q, k, eye, layer.key_table, torch.zeros(33, 256))[0]
        for head in range(4):
            by_distance = [weights[head].diagonal(-distance).mean() for distance in range(25)]
            attended.plot(by_distance, marker=".", label=f"head {head}")
        attended.axvline(16, color="grey", linestyle=":")
        attended.set(title="mean weight of a key", xlabel="distance (clipped at 16)", yscale="log")
        attended.legend()
        for name, table in (("keys", layer.key_table), ("values", layer.value_table)):
            lengths.plot(table[:17].norm(dim=-1).flip(0), marker=".", label=name)
    lengths.set(title="length of the learned vector", xlabel="distance", ylim=(0, None))
    lengths.legend()


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
