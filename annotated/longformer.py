# # Longformer: a window on both sides, and a few global tokens
#
# *Paper: Beltagy, Peters, Cohan, Longformer: The Long-Document Transformer (2020), arXiv 2004.05150. Members:
# `longformer`. Measured: encoders, listops.*
#
# **Problem.** BERT reads 512 tokens, because full attention grows with the square of the length. Long documents are cut
# into pieces, and what links two pieces is lost.
#
# **Idea.** Most context of a token is near it: a window of $w$ tokens on each side. But some tokens need everything,
# such as [CLS], which stands for the whole text, or the tokens of a question. These few see all tokens, and all tokens
# see them. With $G$ for the set of global tokens:
#
# $$ y_i = \sum_{j \in A(i)} p_{ij} v_j, \quad
# p_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt{d})}{\sum_{m \in A(i)} \exp(q_i \cdot k_m / \sqrt{d})}, \quad
# A(i) = \{ j : |i - j| \le w \} \cup G $$

import math

import torch
from torch import nn

# ## The window, with gaps
#
# Stacked layers widen the context of a token: $L$ layers reach $L w$ tokens on each side. Low layers can have small
# windows and high layers large ones. A dilated window reaches farther at the same cost: with dilation $g$ a token sees
# every $g$-th token, up to a distance of $w g$. Heads can have different dilations, so some look near and some far.


def window(time, width, dilations):
    """Whether a query sees a key, bool [heads, time, time]; dilations: one for each head."""
    distance = torch.arange(time)[:, None] - torch.arange(time)
    return torch.stack([(distance.abs() <= width * gap) & (distance % gap == 0) for gap in dilations])


# ## Attention over a set
#
# The softmax normalises over the set $A(i)$ alone, so that the weights of a token sum to 1 however few it sees. A
# global token inside the window counts once: the set is a union.


def attention(q, k, v, seen):
    """q, k, v [batch, heads, time, head_dim], seen bool [batch, heads, time, time] -> the shape of q."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


# ## The layer: global tokens have separate projections
#
# A query of the window asks about its neighbours, and a global query asks about a whole document. One projection for
# both would have to compromise. So the rows of global tokens use a second set: $Q_g$, $K_g$ and $V_g$, applied to all
# tokens. Other tokens read a global token by its ordinary key and value. The second set begins as a copy of the first
# when a trained BERT is extended.
#
# The caller says which tokens are global, and may say so differently for every text. Tokens see later tokens, so the
# layer is for encoders: it generates no text and stores nothing. A causal window alone is the member `local`; a global
# token would break causality, since it passes the end of the text on to the beginning.
#
# With $w$ of at least the length and no global token, the layer is exact softmax attention. The same holds when all
# tokens are global, with the second set of projections.


class LongformerAttention(nn.Module):
    def __init__(self, dim, width, dilations):
        super().__init__()
        self.width, self.dilations = width, dilations
        self.qkv = nn.Linear(dim, 3 * dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def heads(self, x):
        return x.unflatten(-1, (len(self.dilations), -1)).transpose(1, 2)

    def seen(self, global_mask):
        """global_mask bool [batch, time] -> the pairs of ordinary queries, bool [batch, heads, time, time]."""
        return window(global_mask.shape[1], self.width, self.dilations) | global_mask[:, None, None]

    def forward(self, x, global_mask=None):
        """x [batch, time, dim], global_mask [batch, time] bool, True at global tokens -> the shape of x."""
        if global_mask is None:
            global_mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        q, k, v = (self.heads(item) for item in self.qkv(x).chunk(3, -1))
        near = attention(q, k, v, self.seen(global_mask))
        q, k, v = (self.heads(product(x)) for product in (self.query, self.key, self.value))
        far = attention(q, k, v, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
        y = torch.where(global_mask[:, None, :, None], far, near)
        return self.out(y.transpose(1, 2).flatten(2))


# (The page computes every row in both ways and keeps one. A fast form computes `far` for the few global rows, and
# `near` in blocks along the diagonal plus a few columns.)

# ## Costs, and when to take it
#
# | | full attention | Longformer, $w = 256$ on each side, $g$ global tokens |
# | --- | --- | --- |
# | keys of a token | $T$ | $513 + g$ |
# | scores of 4,096 tokens, $g = 1$ | 16.8 million | 2.1 million |
# | projections of a layer | 3 and an output | 6 and an output |
#
# Take it when documents of thousands of tokens are classified or questions about them are answered, or when a trained
# BERT is to read them. Do not take it when texts fit into a few windows: full attention is faster there.
#
# The paper reports 1.10 bits per character on text8 and 1.00 on enwik8 with a causal variant, and better results than
# RoBERTa on long documents, such as 81.9 on WikiHop. On our result page "encoders" the attention of 4,096 tokens ($w =
# 128$, 16 global tokens) takes 341 ms, forward and backward, where full attention takes 1,011 ms and the layer of
# transformers 1,000 ms. On "listops" Longformer reaches 36.3 % in four minutes and full attention 36.1 %, with 300
# steps instead of 100.

# --- proof ---
# The library's layer with the same weights gives the same outputs and gradients, with and without global tokens. With a
# wide window it is the library's full attention.


import proofs

import kinformer


def proof():
    shared = {"inner.projection.qkv": "qkv", "inner.out": "out"}
    own = {f"inner.projection.of_global.{name}": name for name in ("query", "key", "value")}
    marks = torch.zeros(2, 40, dtype=torch.bool)
    marks[0, 0] = marks[0, 25] = marks[1, 3] = True
    for width, dilations in ((4, (1, 1, 1, 1)), (3, (1, 2, 4, 5)), (50, (1, 1, 1, 1))):
        for global_mask in (None, marks):
            print(f"{width} on each side, dilations {dilations}, global tokens: {0 if global_mask is None else 3}")
            page = LongformerAttention(32, width, dilations)
            pattern = {"kind": "window", "window": width, "dilations": dilations}
            library = kinformer.layer("longformer", 32, num_heads=4, pattern=pattern)
            proofs.compare(page, library, shared | own, torch.randn(2, 40, 32), global_mask=global_mask)
    print("a window wider than the text, beside full attention")
    proofs.compare(page, kinformer.layer("bert", 32, num_heads=4), shared, torch.randn(2, 40, 32))


class FirstIsGlobal(LongformerAttention):
    """The first token is global, as [CLS] is."""

    def forward(self, x, global_mask=None):
        return super().forward(x, torch.arange(x.shape[1]).expand(len(x), -1) == 0)


def train():
    return proofs.train(lambda: FirstIsGlobal(64, 6, (1, 1, 2, 4)), __file__, causal=False)


def draw(figure, model):
    """The pattern of three heads with two global tokens, and the inputs on which the middle output depends."""
    *heads, reach = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.3])
    marks = torch.zeros(1, 64, dtype=torch.bool)
    marks[0, 0] = marks[0, 20] = True
    seen = model.layers[0].seen(marks)[0] | marks[0, :, None]
    for axes, head, gap in zip(heads, (0, 2, 3), (1, 2, 4), strict=True):
        axes.imshow(seen[head] + 1.0 * (marks[0] | marks[0, :, None]))
        axes.set(title=f"dilation {gap}", xlabel="key", ylabel="query" if gap == 1 else "")
    text = b"a token sees a window on both sides, and a few global tokens see all of them. " * 2
    x = (model.embed(torch.tensor(list(text[:128]))) + model.position.weight)[None].detach().requires_grad_()
    y = x
    for depth in range(2):
        y = y + model.layers[depth](model.norms[2 * depth](y))
        slopes = torch.autograd.grad(y[0, 64].sum(), x, retain_graph=True)[0][0].norm(dim=-1)
        reach.semilogy(slopes.masked_fill(slopes < 1e-5, math.nan), ".", label=f"layers: {depth + 1}")
    reach.set(title="slopes of output 64", xlabel="input", ylim=(1e-5, 50))
    reach.legend(loc="lower center", fontsize=8)


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
