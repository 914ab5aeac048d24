# # The plain Transformer decoder
#
# *Paper: Radford et al., Language Models are Unsupervised Multitask Learners (2019); attention: Vaswani et al.,
# Attention Is All You Need (2017), arXiv 1706.03762. Members: `gpt`, `post-ln`. Measured: training_step, generation,
# normalisation.*
#
# **Problem.** A model of text has to fetch information from any earlier place. A recurrent network carries everything
# through one vector, step by step: what lies 200 tokens back has been overwritten 200 times, and the steps cannot be
# computed at once.
#
# **Idea.** Let every token look at all earlier tokens directly. A token $i$ asks with a query $q_i$; every token $j$
# offers a key $k_j$ and a value $v_j$. The weights are a softmax over the similarities of the query with the keys:
#
# $$ y_i = \sum_{j \le i} p_{ij} v_j, \quad
# p_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt{d})}{\sum_{m \le i} \exp(q_i \cdot k_m / \sqrt{d})} $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Attention
#
# The division by $\sqrt{d}$, with $d$ the width of a head, keeps the scores at a standard deviation of about 1 when the
# entries of $q$ and $k$ have one of 1. Without it, a softmax of wide heads would put all of its weight on one token,
# and its gradient would vanish.
#
# A query at place `start + i` sees the keys 0 to `start + i`. Without the mask `future` a token would read the tokens
# that it has to predict, and the keys and values cached in later layers would be out of date with each new token.
# `start` is 0 for a whole sequence, and the number of cached tokens when the sequence continues.


def attention(q, k, v):
    """q [batch, heads, time, head_dim], k and v [batch, heads, start + time, head_dim] -> the shape of q."""
    start = k.shape[2] - q.shape[2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(start + 1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


# ## Heads, and the cached step
#
# Several heads look at several places at once: each has a slice of the features, so they cost as much as one wide head.
# The output mixes their answers.
#
# A model that generates repeats this for one more token each time. Keys and values of earlier tokens do not change,
# because no token sees a later one. So they are stored: the state is the pair (k, v), and it grows by one row a token.
# Both forms agree exactly.


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        y = attention(q, k, v).transpose(1, 2).reshape(batch, time, dim)
        return self.out(y), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## The layer
#
# Attention moves information between tokens; a feed-forward network then works on each token alone, four times as wide
# inside. Each adds to its input, so a gradient reaches every layer unchanged.
#
# Where the norm stands decides how deep models train. The original Transformer normalises the sum, $x = \mathrm{LN}(x +
# f(x))$ (post-norm): the shortcut passes through a norm in each layer, and deep stacks need a warm-up of the learning
# rate. GPT-2 normalises the input of $f$ alone, $x = x + f(\mathrm{LN}(x))$ (pre-norm): the shortcut stays free.


class Layer(nn.Module):
    def __init__(self, dim, num_heads, norm_first=True):
        super().__init__()
        self.norm_first = norm_first
        self.attention, self.norm1, self.norm2 = Attention(dim, num_heads), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def feed_forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh") if self.norm_first else F.relu(self.up(x)))

    def step(self, x, state=None):
        y, state = self.attention.step(self.norm1(x) if self.norm_first else x, state)
        x = x + y
        if self.norm_first:
            return x + self.feed_forward(self.norm2(x)), state
        x = self.norm1(x)
        return self.norm2(x + self.feed_forward(x)), state

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# A sequence of $T$ tokens costs $T^2$ comparisons, one more token costs $T$, and the state of a layer of width 512
# after 100,000 tokens holds 102 million numbers. Below a few thousand tokens nothing is better: the comparisons cost
# less than the projections, and one softmax can pick one token among all. The paper claims that a large enough decoder
# solves tasks without training on them. Our result page "normalisation" measures the two places of the norm: 12 layers
# without a warm-up reach 2.30 nats per byte with pre-norm and 3.33 with post-norm.

# --- proof ---
# The library's layers with the same weights give the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    for member, norm_first in (("gpt", True), ("post-ln", False)):
        print(member)
        page = Layer(32, 4, norm_first)
        library = kinformer.layer(member, 32, num_heads=4, whole=True, set={"feed_forward.hidden_dim": 128})
        names = {
            "inner.mixer.projection.qkv": "attention.qkv",
            "inner.mixer.out": "attention.out",
            "inner.mixer_residual.norm": "norm1",
            "inner.feed_forward_residual.norm": "norm2",
            "inner.feed_forward.up": "up",
            "inner.feed_forward.down": "down",
        }
        proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)


def train():
    return proofs.train(lambda: Attention(64, 4), __file__)


def draw(figure, model):
    """The weights of one trained head: each row is a query, the bright cells are the tokens that it reads."""
    x = model.embed(torch.tensor(list(b"each token reads tokens before it"))[None])
    layer = model.layers[0]
    q, k, _ = layer.qkv(model.norms[0](x)).view(1, x.shape[1], 3, 4, -1).permute(2, 0, 3, 1, 4)
    for head, axes in enumerate(figure.subplots(1, 4)):
        eye = torch.eye(x.shape[1])[None, None].expand(1, 4, -1, -1)
        axes.imshow(attention(q, k, eye)[0, head].detach(), vmin=0)
        axes.set(title=f"head {head}", xlabel="key", ylabel="query" if head == 0 else "")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
