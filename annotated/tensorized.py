# # Tensorized Transformer: attention over pairs of tokens
#
# *Paper: Ma, Zhang, Zhang, Duan, Hou, Zhou, Song: A Tensorized Transformer for Language Modeling (2019), arXiv
# 1906.09777. Members: `tensorized`. Measured: quality.*
#
# **Problem.** Multi-head attention has many weights, and its heads repeat each other. Can one small set of factors,
# shared by all heads, replace them?
#
# **Idea.** Give up the softmax and look at the product of queries, keys and values as one tensor of three indices, in
# block-term form: factors $q, k, v$ of a small rank $R$, and a core $g$. The output of a query is a learned sum over
# all *pairs* of earlier tokens:
#
# $$ T_{ijk} = \sum_{r=1}^{R} g_r\, q_{ir}\, k_{jr}\, v_{kr}, \quad y_i = \sum_{j,\, k \le i} W_{jk}\, T_{ijk} $$
#
# $W$ has one vector of the model's width for each pair of places.

import torch
from torch import nn

# ## What the tensor has to do with attention
#
# Sum $T$ over $k$ with values of 1 and a core of 1: $\sum_r q_{ir} k_{jr}$ is the matrix of scores of ordinary
# attention. A slice of the tensor is such a matrix, filtered by a value $v_k$. The paper argues that attention can be
# rebuilt from the tensor by a sum over one index; this holds for attention without its softmax. The softmax itself is
# in no limit: nothing here is divided by a sum, so weights can be negative and outputs grow with the length. The
# learned $W$ has to undo this.
#
# Several cores, averaged, are the blocks of the decomposition. In the authors' code the blocks share $q$, $k$ and $v$.
# Then the mean of the tensors is the tensor of the mean core, and more blocks add no capacity.

# ## Positions
#
# $W_{jk}$ knows where $j$ and $k$ stand, but not what stands where relative to the query. The authors' language model
# adds a second term, after Transformer-XL, but without the shift that would make distances relative to the query: a
# projected sinusoid $p_j$ of the key's distance to the last place of the longest text, and learned vectors $u$ and $w$
# that do not depend on the query,
#
# $$ T_{ijk} = \sum_r g_r\, [(q_{ir} + u_r)\, k_{jr} + (q_{ir} + w_r)\, p_{jr}]\, v_{kr} $$


def sinusoids(distances, dim):
    """distances [n] -> sines, then cosines [n, dim]."""
    angles = distances[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([angles.sin(), angles.cos()], -1)


# ## First form: the whole tensor
#
# The sum runs over pairs with both $j \le i$ and $k \le i$. Without this mask a query sees later tokens. The authors'
# code has a mask and never applies it, so its published perplexities belong to a model that sees its target.


def parallel(queries, keys, v, W):
    """queries, keys, v [batch, time, R], W [dim, time, time] -> [batch, time, dim]; the core is in the queries."""
    T = torch.einsum("bir,bjr,bkr->bijk", queries, keys, v)
    seen = torch.ones(v.shape[1], v.shape[1]).tril()
    T = T * seen[None, :, :, None] * seen[None, :, None, :]
    return torch.einsum("djk,bijk->bid", W, T)


# ## Second form: a matrix as state
#
# $T$ has $n^3$ elements and need not exist. The query enters linearly, so it can be moved out of the sum over pairs:
#
# $$ M_t = \sum_{j,\, k \le t} W_{jk}\, (k_j \circ v_k)^\top, \quad y_t = M_t\, q_t $$
#
# One more token adds the pairs that it completes: itself as the key with each value so far, and itself as the value
# with each earlier key. This is the state of linear attention with pairs in the place of tokens.


def recurrent(queries, keys, v, W, M):
    """The same for the last tokens of keys and v [batch, past + time, R]; M [batch, dim, R] of the pairs before."""
    outputs, past = [], v.shape[1] - queries.shape[1]
    for t in range(past, v.shape[1]):
        as_key = torch.einsum("dk,bkr->bdr", W[:, t, : t + 1], v[:, : t + 1]) * keys[:, None, t]
        as_value = torch.einsum("dj,bjr->bdr", W[:, :t, t], keys[:, :t]) * v[:, None, t]
        M = M + as_key + as_value
        outputs.append(M @ queries[:, t - past, :, None])
    return torch.cat(outputs, -1).transpose(1, 2), M


# ## The layer
#
# The two terms stand side by side: queries $[(q + u) g;\, (q + w) g]$ and keys $[k;\, p]$ of width $2R$, and each value
# twice. The state is keys, values and $M$.


class Tensorized(nn.Module):
    def __init__(self, dim, rank, blocks, max_length, positions=True):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * rank, bias=False)
        self.position = nn.Linear(dim, rank, bias=False) if positions else None
        self.biases = nn.Parameter(0.1 * torch.randn(1 + positions, rank))  # u, and w
        self.core = nn.Parameter(torch.randn(blocks, rank).softmax(-1))
        self.W = nn.Parameter(torch.empty(dim, max_length, max_length).uniform_(-1 / max_length, 1 / max_length))

    def factors(self, x, start=0):
        q, k, v = self.qkv(x).chunk(3, -1)
        queries = torch.cat([(q + bias) * self.core.mean(0) for bias in self.biases], -1)
        if self.position is None:
            return queries, k, v
        last = self.W.shape[-1] - 1 - start
        p = self.position(sinusoids(torch.arange(last, last - x.shape[1], -1), x.shape[-1]))
        return queries, torch.cat([k, p.expand(len(x), -1, -1)], -1), torch.cat([v, v], -1)

    def forward(self, x):
        time = x.shape[1]
        return parallel(*self.factors(x), self.W[:, :time, :time])

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        queries, keys, v = self.factors(x, 0 if state is None else state[0].shape[1])
        M = x.new_zeros(len(x), x.shape[-1], v.shape[-1])
        if state is not None:
            keys, v, M = torch.cat([state[0], keys], 1), torch.cat([state[1], v], 1), state[2]
        y, M = recurrent(queries, keys, v, self.W, M)
        return y, (keys, v, M)


# ## Costs, and when to take it
#
# $W$ has $\mathrm{dim} \cdot n^2$ weights for sequences of $n$ tokens, 262,144 at a width of 256 and 32 tokens, and
# fixes the longest length. The first form computes $n^3 (R + \mathrm{dim})$ products. In the second, token $t$ costs
# $4\, t\, \mathrm{dim}\, R$ with both terms, and the state holds $2 \mathrm{dim} R$ numbers of $M$ and $2 R$ a token.
# At rank 40 that is 20,480 numbers of $M$ at a width of 256, like 40 tokens of softmax attention.
#
# The paper claims 18.9 perplexity on WikiText-103 with fewer weights, from the code without its mask, so the figure
# says nothing about a causal model. Our result page "quality" trains all members on text for equal minutes: tensorized
# reaches 2.029 bits per byte on windows of 32 tokens, and the plain decoder 1.732 on windows of 128.
#
# Take it to study attention as a tensor. Do not take it for texts longer than some hundred tokens: `linear-transformer`
# has the same kind of state without weights for pairs.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    for rank, blocks, positions in ((5, 2, True), (4, 1, False)):
        print(f"rank {rank}, {blocks} blocks, " + ("with" if positions else "without") + " positions")
        page = Tensorized(32, rank, blocks, 36, positions)
        library = kinformer.layer("tensorized", 32, rank=rank, blocks=blocks, max_length=36, positions=positions)
        names = {"inner.query_bias": "biases", "inner.core": "core", "inner.pairs": "W", "inner.qkv": "qkv"}
        if positions:
            names["inner.position"] = "position"
        proofs.compare(page, library, names, torch.randn(2, 34, 32), page.step)


def train():
    return proofs.train(lambda: Tensorized(32, 16, 1, 32), __file__, dim=32, length=32)


def draw(figure, model):
    """The pairs that a query reads: its tensor, and the pairs' contributions to the output."""
    text = torch.tensor(list(b"a query reads pairs of tokens..."))
    layer = model.layers[0]
    with torch.no_grad():
        queries, keys, v = layer.factors(model.norms[0](model.embed(text[None]) + model.position.weight))
        seen = torch.ones(32, 32).tril()
        for axes, i in zip(figure.subplots(1, 4), (7, 15, 31, None)):
            if i is None:
                axes.imshow(layer.W.norm(dim=0), cmap="magma")
                axes.set(title="length of $W_{jk}$", xlabel="value k")
                continue
            T = torch.einsum("r,jr,kr->jk", queries[0, i], keys[0], v[0]) * seen[i, :, None] * seen[i]
            limit = T.abs().max()
            axes.imshow(T, cmap="RdBu", vmin=-limit, vmax=limit)
            axes.set(title=f"$T$ of query {i}", xlabel="value k", ylabel="key j" if i == 7 else "")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
