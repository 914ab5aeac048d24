# # Linformer: attention to a fixed number of summaries
#
# *Paper: Wang, Li, Khabsa, Fang, Ma: Linformer: Self-Attention with Linear Complexity (2020), arXiv 2006.04768.
# Members: `linformer`. Measured: linformer_rank.*
#
# **Problem.** An encoder of $n$ tokens computes $n^2$ attention weights in every head. Their matrix has a low rank in
# trained models: most of its singular values are small. So most of the work is redundant.
#
# **Idea.** Before attention, project the *length* of keys and values from $n$ tokens to $k$ summaries with learned
# matrices $E$ and $F$ $[k, n]$. Every query attends to $k$ summaries instead of $n$ tokens:
#
# $$ Y = \mathrm{softmax}\left(\frac{Q (E K)^\top}{\sqrt{d}}\right) F V, \quad Q = X W_Q, \; K = X W_K, \; V = X W_V $$
#
# The cost is $n k$. By the lemma of Johnson and Lindenstrauss, random projections to about $\log n / \epsilon^2$
# summaries keep all products to $\epsilon$; another bound, about $d \log d / \epsilon^2$, does not depend on $n$ at all
# (theorem 2).

import math

import torch
from torch import nn

# ## Projections of the length
#
# A row of $E$ has one weight for each position of the longest text. A shorter text uses the first columns. The same
# matrix may serve all heads, keys and values alike, and all layers; the paper finds that one matrix for everything is
# nearly as good, and it costs the fewest weights:
#
# | sharing | matrices in 12 layers of 12 heads |
# | --- | --- |
# | none | 288 |
# | heads | 24 |
# | keys and values | 12 |
# | layers | 1 |
#
# The bias of a key is added behind $E$: as part of a key it would be multiplied by the sums of the rows of $E$. Instead
# of $E (X W)$ one can compute $(E X) W$, where only $k$ rows pass through $W$ and no token ever has a key. This form is
# cheaper if all heads share $E$.


def summarise(x, linear, E, num_heads):
    """x [batch, time, dim], E [heads or 1, k, time] -> k summaries of linear(x), [batch, heads, k, head_dim]."""
    tokens = (x @ linear.weight.T).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return E @ tokens + linear.bias.view(num_heads, 1, -1)


# ## Projections without weights
#
# Instead of a learned $E$ the paper also tries means of $n / k$ neighbours (pooling), which is a fixed $E$. A text that
# is shorter than the longest has fewer windows, and the last window may have fewer tokens.


def pooling(time, width):
    """Return E [1, windows, time]: row r is the mean of the tokens r * width to (r + 1) * width - 1."""
    window = torch.arange(time) // width
    E = (torch.arange(-(-time // width))[:, None] == window).to(torch.get_default_dtype())
    return (E / E.sum(1, keepdim=True))[None]


# ## The layer
#
# Behind the projections stands ordinary softmax attention, over summaries. The softmax is the normalisation: weights of
# the summaries sum to 1. But $E$ may have negative entries, so the weight of a single token may be negative.
#
# Every summary mixes tokens of the whole text. A mask over the $k$ summaries cannot hide the future from a query, so a
# causal form does not exist. The layer cannot generate and stores nothing: one more token changes all summaries.
# Padding must be set to zero before the projection; a mask over tokens cannot be applied later.


class Linformer(nn.Module):
    def __init__(self, dim, num_heads, k, max_length, sharing="keys_values"):
        super().__init__()
        self.num_heads, self.width = num_heads, max_length // k
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        shape = (1 if sharing == "keys_values" else 2, num_heads if sharing == "none" else 1, k, max_length)
        # Xavier's bound with a gain of 1 / sqrt(2), as the authors have it
        bound = math.sqrt(3 / (k + max_length))
        self.EF = None if sharing == "mean" else nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

    def projections(self, time):
        """Return E and F [heads or 1, summaries, time]."""
        if self.EF is None:
            return pooling(time, self.width), pooling(time, self.width)
        return self.EF[0, :, :, :time], self.EF[-1, :, :, :time]

    def forward(self, x):
        """x [batch, time, dim], the whole text -> the same shape."""
        E, F = self.projections(x.shape[1])
        q = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = summarise(x, self.key, E, self.num_heads), summarise(x, self.value, F, self.num_heads)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)  # [batch, heads, time, k]
        return self.out((weights @ v).transpose(1, 2).flatten(2))


# ## Costs, and when to take it
#
# A token costs $k$ scores a head, and its key and its value enter $k$ summaries. With $k = 256$ a text of 32,768 tokens
# costs 128 times fewer comparisons than full attention. One matrix for texts of 512 tokens has 131,072 weights. With $k
# = n$ and $E = F = I$ the layer is exact softmax attention; the proof checks this case too.
#
# The paper claims the quality of RoBERTa on four tasks of classification (92.30 with $k = 256$, 92.25 for RoBERTa) and
# up to 20 times the speed at 65,536 tokens. Our result page "linformer_rank" measures that time grows as $n^{1.03}$ up
# to 32,768 tokens, and as $n^{1.87}$ for exact attention up to 8,192. It also measures the assumption, in a layer of
# random weights with 256 tokens: the best matrices of rank 64, found for one text by its singular values, leave an
# error of 4 %, but means of neighbours leave 63 % and fitted means 57 %. The low rank is there, but each text has
# another one, and $E$ is the same for all texts. So the other weights must learn together with $E$, from the first step
# on.
#
# Take it for encoders whose texts have nearly one length, trained from scratch. Do not take it where lengths vary,
# where a trained model is to be made faster, or where a model must generate.

# --- proof ---
# The library's layer with the same weights gives the same outputs and gradients.


import proofs

import kinformer


def proof():
    x = torch.randn(2, 30, 32)
    names = {f"inner.{name}": name for name in ("query", "key", "value", "out")}
    for sharing in ("keys_values", "heads", "none", "mean"):
        print(f"sharing: {sharing}")
        page = Linformer(32, 4, 10, 40, sharing)
        settings = {"method": "mean", "sharing": "heads"} if sharing == "mean" else {"sharing": sharing}
        library = kinformer.layer("linformer", 32, num_heads=4, rank=10, max_length=40, shared=False, set=settings)
        proofs.compare(page, library, names | ({} if sharing == "mean" else {"inner.length.weight": "EF"}), x)
    print("k = n and E = F = I")
    page, library = Linformer(32, 4, 30, 30), kinformer.layer("linformer", 32, num_heads=4, rank=30, max_length=30)
    with torch.no_grad():
        page.EF.copy_(torch.eye(30))
    proofs.compare(page, library, names | {"inner.length.weight": "EF"}, x)
    q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (page.query, page.key, page.value))
    exact = page.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    assert torch.allclose(page(x), exact, atol=1e-10)


def train():
    return proofs.train(lambda: Linformer(64, 4, 32, 128), __file__, causal=False)


def draw(figure, model):
    """The trained E, the weights of tokens that follow from it, and the singular values of full attention."""
    layer = model.layers[0]
    text = torch.tensor(
        list(b"every query attends to summaries of the whole text, and none of them is a token. " * 2)[:128]
    )
    x = model.norms[0](model.embed(text[None]) + model.position.weight)
    E = layer.projections(128)[0][0].detach()
    q, k = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (layer.query, layer.key))
    short = summarise(x, layer.key, E[None], 4)
    weights = ((q @ short.transpose(-2, -1)) / 4).softmax(-1)[0, 0] @ E
    full = (q @ k.transpose(-2, -1) / 4).softmax(-1)[0].detach()
    panels = figure.subplots(1, 3)
    for axes, matrix, title, ylabel in (
        (panels[0], E, "trained E", "summary"),
        (panels[1], weights.detach(), "weights of tokens", "query"),
    ):
        largest = matrix.abs().max()
        axes.imshow(matrix, vmin=-largest, vmax=largest, cmap="RdBu", aspect="auto")
        axes.set(title=title, xlabel="token", ylabel=ylabel)
    for head, values in enumerate(torch.linalg.svdvals(full)):
        panels[2].plot(values.square().cumsum(0) / values.square().sum(), label=f"head {head}")
    panels[2].set(
        title="rank of full attention", xlabel="singular values", ylabel="share of the squares", ylim=(0, 1.05)
    )
    panels[2].legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
