# # Primer: squared ReLU, and projections that look back
#
# *Paper: So et al., Primer: Searching for Efficient Transformers for Language Modeling (2021), arXiv 2109.08668.
# Members: `primer`. Measured: quality.*
#
# **Problem.** The Transformer's parts were chosen by hand. A search over programs may find parts that reach the same
# quality with less computation.
#
# **Idea.** The authors evolve TensorFlow programs of a language model and keep what learns fastest. Two changes carry
# most of the gain, and the paper recommends them alone as Primer-EZ: the feed-forward squares its ReLU, and queries,
# keys and values are mixed over the last three tokens, feature by feature.
#
# $$ \mathrm{FF}(x) = W_2 \, \mathrm{ReLU}(W_1 x)^2, \quad
# z_t = w_0 \odot y_t + w_1 \odot y_{t-1} + w_2 \odot y_{t-2} $$
#
# Here $y$ is a query, key or value as usual, and $z$ takes its place.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The squared ReLU
#
# The square makes large inputs larger and keeps small ones near 0, and it does not have a kink at 0. It resembles the
# product of two projections in gated units such as GLU, with one projection for both factors and without its weights.


def squared_relu(x):
    return F.relu(x).square()


# ## The convolution over time
#
# Each feature of each head has its own three weights, without a bias. A head can then compare pairs or triples of
# tokens within a single layer: "the token after an earlier *th*" takes two layers of plain attention, and one of these.
# At the beginning a token's own weight is 1/2 and the others are 1/6 each.
#
# The convolution reaches to the left only. Reaching to the right would break causality, although the mask of attention
# stood. The two tokens before a sequence count as zeros.


def convolve(y, weight, recent=None):
    """y [batch, heads, time, head_dim], weight [3, heads, head_dim] -> the same shape, and the last two tokens of y."""
    before = y.new_zeros(*y.shape[:2], 2, y.shape[3]) if recent is None else recent
    y = torch.cat([before, y], 2)
    time = y.shape[2] - 2
    z = sum(weight[shift][:, None] * y[:, :, 2 - shift : 2 - shift + time] for shift in range(3))
    return z, y[:, :, time:]


# ## Attention with T5's biases
#
# Primer grew out of T5's decoder, so positions are T5's: one learned number for each head and bucket of distances,
# added to the score. Each distance below 16 has a bucket, and the rest widen up to 128. Scores are divided by
# $\sqrt{d}$ to keep them near a standard deviation of 1. (The authors leave the division to the first weights.)


def bucket(distance):
    ratio = (distance.clamp_min(16) / 16).log() / math.log(128 / 16)
    return torch.where(distance < 16, distance, (16 + (ratio * 16).long()).clamp_max(31))


def attention(q, k, v, table):
    """q [batch, heads, time, head_dim], k and v [batch, heads, start + time, head_dim], table [32, heads]."""
    start = k.shape[2] - q.shape[2]
    distance = torch.arange(start, k.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + table[bucket(distance.clamp_min(0))].permute(2, 0, 1)
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v


# ## The layer, and the cached step
#
# The state holds the convolved keys and values, one row a token, and the last two projections before the convolution,
# which the next tokens need. A cache of keys and values alone would give the first two tokens of every chunk wrong
# neighbours.
#
# The whole Primer changes two more things. Queries are made of the convolved keys by one more matrix, instead of the
# token. And the feed-forward's norm stands behind it, $x + \mathrm{LN}(\mathrm{FF}(x))$. The page has both versions.


class Layer(nn.Module):
    def __init__(self, dim, num_heads, whole=False):
        super().__init__()
        self.num_heads, self.whole = num_heads, whole
        self.kinds = 2 if whole else 3  # k and v, or q, k and v
        self.project = nn.Linear(dim, self.kinds * dim, bias=False)
        self.query = nn.Linear(dim, dim, bias=False) if whole else None
        self.kernel = nn.Parameter(torch.full((3, self.kinds * num_heads, dim // num_heads), 1 / 6))
        nn.init.constant_(self.kernel[0], 1 / 2)
        self.table = nn.Parameter(torch.zeros(32, num_heads))
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def split(self, y):
        return y.view(*y.shape[:2], -1, self.kernel.shape[-1]).transpose(1, 2)

    def attend(self, x, state):
        batch, time, dim = x.shape
        past_k, past_v, recent = state or (None, None, None)
        z, recent = convolve(self.split(self.project(x)), self.kernel, recent)
        *q, k, v = z.chunk(self.kinds, 1)
        q = self.split(self.query(k.transpose(1, 2).reshape(batch, time, dim))) if self.whole else q[0]
        if state is not None:
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        y = attention(q, k, v, self.table)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim)), (k, v, recent)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        y, state = self.attend(self.norm1(x), state)
        x = x + y
        if self.whole:
            return x + self.norm2(self.down(squared_relu(self.up(x)))), state
        return x + self.down(squared_relu(self.up(self.norm2(x)))), state

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# The convolution costs $9 D$ multiplications a token for a model of width $D$, beside $12 D^2$ of a layer, but it reads
# and writes all queries, keys and values once more. Attention costs $T^2$ comparisons in training and $T$ for a
# generated token. The state holds $2 D$ numbers a token and layer and $6 D$ more, however long the text is. With the
# kernel (1, 0, 0) it is exact attention with T5's biases.
#
# The paper claims, at 500 million parameters on C4, the quality of T5's architecture with a quarter of its training
# cost. Our result page "quality" has 1.741 bits per byte after four minutes: before `t5`, the decoder that it grew out
# of, with 1.761, and behind `gpt` with 1.732 and `rope` with 1.715. Take Primer-EZ where a small change of a standard
# decoder should learn faster per step. Do not take it where steps must be the fastest.

# --- proof ---
# The library's layers with the same weights give the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.mixer.projection.weight": "kernel",
        "inner.mixer.projection.inner.qkv": "project",
        "inner.mixer.position.table": "table",
        "inner.mixer.out": "out",
        "inner.mixer_residual.norm": "norm1",
        "inner.feed_forward_residual.norm": "norm2",
        "inner.feed_forward.up": "up",
        "inner.feed_forward.down": "down",
    }
    for recipe in ("small", "whole"):
        print("Primer-EZ" if recipe == "small" else "the whole Primer")
        if recipe == "whole":
            del names["inner.mixer.projection.inner.qkv"]
            names |= {"inner.mixer.projection.kv": "project", "inner.mixer.projection.query": "query"}
        page = Layer(32, 4, whole=recipe == "whole")
        nn.init.normal_(page.kernel)
        nn.init.normal_(page.table)
        settings = {"feed_forward.hidden_dim": 128}
        library = kinformer.layer("primer", 32, num_heads=4, whole=True, recipe=recipe, set=settings)
        proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)


def train():
    return proofs.train(lambda: Layer(64, 4), __file__, positions=False)


def draw(figure, model):
    """Left: the activation beside its relatives. Right: trained weights of the convolution, of all features."""
    curves, kernel = figure.subplots(1, 2)
    x = torch.linspace(-2, 2, 200)
    for name, activation in (("squared ReLU", squared_relu), ("ReLU", F.relu), ("GELU", F.gelu)):
        curves.plot(x, activation(x), label=name)
    curves.set(title="activation", ylim=(-0.5, 4))
    curves.legend()
    weight = model.layers[0].kernel.detach().view(3, 3, -1)
    for kind in range(3):
        for shift in range(3):
            place = kind + 0.26 * (shift - 1) + 0.02 * torch.randn(weight.shape[2])
            label = ("token itself", "token before", "two before")[shift] if kind == 0 else None
            kernel.plot(place, weight[shift, kind], ".", color=f"C{shift}", alpha=0.5, label=label)
    kernel.set_xticks(range(3), ["queries", "keys", "values"])
    kernel.set(title="trained weights, first layer")
    kernel.legend(loc="upper center", ncols=3, fontsize=7)
    kernel.margins(y=0.2)


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
