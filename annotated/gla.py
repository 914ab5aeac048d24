# # Gated linear attention
#
# *Paper: Yang, Wang, Shen, Panda, Kim: Gated Linear Attention Transformers with Hardware-Efficient Training (2024),
# arXiv 2312.06635. Members: `gla`. Measured: mqar, mqar_16, kernel_attention, delta_rules.*
#
# **Problem.** Linear attention never forgets, and a fixed decay (the page `retnet`) forgets by the clock: a name that
# is needed 500 tokens later fades exactly as fast as a comma.
#
# **Idea.** Let the token decide, and let every channel of the keys have its own decay. The decay $\alpha_t$ is a vector
# between 0 and 1, computed from the token:
#
# $$ S_t = \mathrm{diag}(\alpha_t)\, S_{t-1} + k_t v_t^\top, \quad y_t = S_t^\top q_t / \sqrt{d} $$
#
# $$ \alpha_t = \sigma(W_2 W_1 x_t + b)^{1/16} $$
#
# A channel with $\alpha = 1$ is a memory without loss, and a channel with $\alpha = 0$ starts anew. Both can stand in
# one head.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The decays
#
# $W_1$ has rank 16, so decays for all channels cost few weights. The root is decisive: $\sigma(0) = 0.5$ would lose
# half of the past with every token, before training can learn that the past matters. The sixteenth root begins at
# $0.5^{1/16} = 0.96$. Decays are kept as logarithms, where the root is a quotient and products are sums.


class Decay(nn.Module):
    def __init__(self, dim, num_heads, head_dim, rank=16):
        super().__init__()
        self.num_heads = num_heads
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, num_heads * head_dim)

    def forward(self, x):
        """x [batch, time, dim] -> log alpha [batch, heads, time, head_dim], below 0."""
        return F.logsigmoid(self.up(self.down(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)) / 16


# ## First form: a state
#
# One matrix for each head. The decay acts on its rows, which belong to channels of keys and queries.


def recurrent(q, k, v, log_alpha, S):
    """q, k, log_alpha [batch, heads, time, head_dim], v [batch, heads, time, value_dim], S [batch, heads, head_dim,
    value_dim] -> outputs in the shape of v, and the last S."""
    outputs = []
    for t in range(q.shape[2]):
        S = log_alpha[:, :, t, :, None].exp() * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((q[:, :, t, None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 2), S


# ## Second form: all pairs
#
# With $B_t = \log \alpha_1 + \ldots + \log \alpha_t$, key $j$ reaches query $i$ in channel $c$ with the factor
# $\exp(B_{ic} - B_{jc})$:
#
# $$ y_i = \frac{1}{\sqrt{d}} \sum_{j \leq i} \sum_c q_{ic} k_{jc} \exp(B_{ic} - B_{jc})\, v_j $$
#
# It is tempting to write this as one product of matrices, $(q \circ e^{B}) (k \circ e^{-B})^\top$. But $e^{-B}$ grows
# without limit: after 1,000 tokens with $\alpha = 0.9$ it is $10^{45}$, more than float32 holds. The difference of the
# exponents is never above 0 where $j \leq i$, so it is taken first, at the price of a tensor with one more axis. This
# is the exact form for short sequences.


def parallel(q, k, v, log_alpha):
    """The same function from an empty state."""
    B, time = log_alpha.cumsum(2), torch.arange(q.shape[2])
    future = (time > time[:, None])[:, :, None]
    factors = (B[:, :, :, None] - B[:, :, None]).masked_fill(future, -torch.inf).exp()  # [.., query, key, channel]
    return torch.einsum("bhic,bhjc,bhijc->bhij", q, k, factors) @ v


# ## Third form: chunks
#
# In a chunk of few tokens $e^{-B}$ stays small when $B$ counts from the start of the chunk. Then both products of
# matrices are safe, and the state carries everything older. This is the form for training: $T C$ comparisons with
# chunks of $C$ tokens, in products of matrices alone.


def chunked(q, k, v, log_alpha, S, size=16):
    outputs = []
    for queries, keys, values, logs in zip(*(x.split(size, 2) for x in (q, k, v, log_alpha))):
        B = logs.cumsum(2)
        inside = ((queries * B.exp()) @ (keys * (-B).exp()).transpose(-2, -1)).tril()
        outputs.append(inside @ values + (queries * B.exp()) @ S)
        last = B[:, :, -1:]
        S = last.transpose(-2, -1).exp() * S + (keys * (last - B).exp()).transpose(-2, -1) @ values
    return torch.cat(outputs, 2), S


# ## The layer
#
# Weights have either sign, so they are not divided by a sum, which could vanish. A norm of each head replaces the
# denominator: it undoes any factor of a row. A gate with a silu is the output's non-linearity. The paper takes keys
# half as wide as values.


class GatedLinearAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.sizes = num_heads, (dim // 2, dim // 2, dim)
        self.qkv, self.decay = nn.Linear(dim, 2 * dim, bias=False), Decay(dim, num_heads, dim // 2 // num_heads)
        self.gate, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def project(self, x):
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return q / math.sqrt(q.shape[-1]), k, v, self.decay(x)

    def write(self, y, x):
        return self.out(F.layer_norm(y, y.shape[-1:]).transpose(1, 2).flatten(2) * F.silu(self.gate(x)))

    def step(self, x, S=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, v, log_alpha = self.project(x)
        S = x.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if S is None else S
        y, S = form(q, k, v, log_alpha, S)
        return self.write(y, x), S

    def forward(self, x):
        return self.step(x, form=chunked)[0]


# ## Costs, and when to take it
#
# A head with keys of 32 and values of 64 stores 2,048 numbers, and a token reads and writes each once. The form of all
# pairs costs $T^2 d$ exponentials, the chunked form none beyond $T d$. The norm over a head keeps causality; a norm
# over time would break it. With $\alpha = 1$ the layer is linear attention with the identity as feature map and without
# a denominator. It reaches softmax attention in no limit.
#
# The paper claims the quality of LLaMA's architecture and of Mamba at 1.3 billion parameters, and texts ten times as
# long as in training. Our result page "mqar_16" measures 99 % of 16 pairs recalled after 1,200 steps from 17,920 bytes
# of state; softmax attention needs 132,624 bytes, `retnet` has 66 % after 2,000 steps. Forward and backward over 4,096
# tokens take 0.26 of the time of softmax attention, and linear attention without decays 0.12 ("kernel_attention").
#
# Take it where a small state has to recall and the text says what to keep. Do not take it where facts are overwritten:
# a decay forgets everything in a channel, while the delta rule (`gated-deltanet`) replaces the value of one key.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    page = GatedLinearAttention(32, 4)
    library = kinformer.layer("gla", 32, num_heads=4, head_dim=4, value_dim=8)
    names = {f"inner.{name}": name for name in ("qkv", "gate", "out", "decay")}
    x = torch.randn(2, 30, 32)
    proofs.compare(page, library, names, x, page.step)
    proofs.equal("all pairs", page.write(parallel(*page.project(x)), x), library(x))


def train():
    return proofs.train(lambda: GatedLinearAttention(64, 4), __file__)


def draw(figure, model):
    """How long every channel of a trained layer remembers, token by token."""
    text = b"every channel decides from the token how much of its past it keeps"
    x = model.embed(torch.tensor(list(text))[None])
    for axes, layer, norm in zip(figure.subplots(2, 1, sharex=True), model.layers, (model.norms[0], model.norms[2])):
        half_lives = math.log(0.5) / layer.decay(norm(x))[0].detach().transpose(1, 2).flatten(0, 1)
        order = half_lives.median(1).values.argsort()
        image = axes.imshow(half_lives[order].log10(), aspect="auto", vmin=0, vmax=3)
        axes.set(ylabel="channel", xticks=range(len(text)), xticklabels=text.decode())
    figure.colorbar(image, ax=figure.axes, label="log10 of half-life in tokens")
    figure.axes[0].set_title("half-lives of the channels in two layers")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
