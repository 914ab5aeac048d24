# # Softmax attention with a forget gate
#
# *Paper: Lin et al., Forgetting Transformer: Softmax Attention with a Forget Gate (2025), arXiv 2503.02130. Members:
# `forgetting`. Measured: forgetting, modern_lengths.*
#
# **Problem.** Recurrent networks with gates decide from the token what to forget. Softmax attention cannot: an old
# token counts like a new one unless the positions say otherwise, and positions fade everything out alike, whatever was
# written.
#
# **Idea.** Every token computes a gate $f_t$ between 0 and 1 for each head. Passing it, all earlier tokens lose weight
# by this factor. In the softmax, a factor of the weight is a sum of logarithms in the score:
#
# $$ s_{ij} = \frac{q_i \cdot k_j}{\sqrt{d}} + \sum_{l = j + 1}^{i} \ln f_l, \quad f_l = \sigma(w \cdot x_l + b) $$
#
# A full stop can clear the sentence before it, and a blank can let everything pass. The bias is data-dependent ALiBi:
# with a constant $f$ in each head it is ALiBi with the slope $-\ln f$, and with $f = 1$ it is exact attention without
# positions.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## First form: a bias for each pair
#
# With the running sum $c_i = \ln f_1 + \ldots + \ln f_i$, the bias of a pair is a difference, $c_i - c_j$. So it needs
# one number a token, and not a sum for each pair. One function computes the logarithm of the gate: the logarithm of a
# rounded sigmoid would be $-\infty$ for an almost shut gate.


def parallel(q, k, v, log_f):
    """q, k and v [batch, heads, time, head_dim], log_f [batch, heads, time] -> the shape of q."""
    c = log_f.cumsum(-1)
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + c[..., :, None] - c[..., None, :]
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


# The mask hides later tokens before the softmax. Without it the model would not be causal, and later keys would even
# gain: for them the bias $c_i - c_j$ is positive.
#
# A kernel that knows neither gates nor biases can still compute this: two more features turn the bias into a part of
# the product.
#
# $$ q_i \cdot k_j + \sqrt{d}\,(c_i - c_j) = [q_i, \sqrt{d}\, c_i, 1] \cdot [k_j, 1, -\sqrt{d}\, c_j] $$


def with_features(q, k, c):
    """Return queries and keys whose product holds the bias, for any kernel of scaled dot products."""
    c, one = math.sqrt(q.shape[-1]) * c[..., None], torch.ones_like(c[..., None])
    return torch.cat([q, c, one], -1), torch.cat([k, one, -c], -1)


# ## Second form: token by token
#
# A generating model keeps for each key what has been lost since it was written, `lost`. A new token adds the logarithm
# of its gate to each number, and begins with 0 itself. The state is (k, v, lost): one number more for each key and
# head. It grows like the state of plain attention, because a forgotten key is only weighed less and not removed.


def recurrent(q, k, v, log_f, state=None):
    """The same function one token at a time, and the state behind the last token."""
    batch, heads, time, head_dim = q.shape
    empty = q.new_zeros(batch, heads, 0, head_dim)
    keys, values, lost = state or (empty, empty, q.new_zeros(batch, heads, 0))
    outputs = []
    for t in range(time):
        lost = torch.cat([lost + log_f[:, :, t, None], torch.zeros_like(log_f[:, :, t, None])], -1)
        keys, values = torch.cat([keys, k[:, :, t, None]], 2), torch.cat([values, v[:, :, t, None]], 2)
        scores = (q[:, :, t, None] @ keys.mT)[:, :, 0] / math.sqrt(head_dim) + lost
        outputs.append((scores.softmax(-1)[:, :, None] @ values)[:, :, 0])
    return torch.stack(outputs, 2), (keys, values, lost)


# ## The layer
#
# The division by $\sqrt{d}$ is the usual one and does not touch the gates: a gate of 1/2 halves a weight in heads of
# all widths. Softmax stays the normalisation, so weights still sum to 1: where everything old is forgotten, the token
# itself gets the weight. The layer does not have other positions. Tokens fall behind, which tells near from far.
#
# The gate is one number for each head. It begins near 1/2, since $w \cdot x + b$ begins near 0, and a half is gone with
# every token until the gates learn to stay open.


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.gate = nn.Linear(dim, num_heads)
        self.out = nn.Linear(dim, dim)

    def project(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return q, k, v, F.logsigmoid(self.gate(x)).transpose(1, 2)

    def forward(self, x):
        """x [batch, time, dim] -> the same shape, all tokens at once."""
        return self.out(parallel(*self.project(x)).transpose(1, 2).flatten(2))

    def step(self, x, state=None):
        """The same for the next tokens behind a state, and the state after them."""
        y, state = recurrent(*self.project(x), state)
        return self.out(y.transpose(1, 2).flatten(2)), state


# ## Costs, and when to take it
#
# Training costs $T^2$ comparisons, a generated token $T$. The gates add $H D$ weights to the $4 D^2$ of attention of
# width $D$ with $H$ heads. The state of 32,768 tokens grows from 64 to 65 MiB for 4 heads of 64 (page
# "modern_lengths").
#
# On our result page "forgetting", a training step by the two features takes 1.0 to 1.6 times as long as without gates,
# where a bias for all pairs takes 3.3 to 6.6 times; one generated token after 4,096 takes 2.38 ms instead of 2.26. At
# 32,768 tokens a whole layer takes 2.0 times as long as plain attention, which has a fused kernel.
#
# The paper claims better language modelling on long contexts, better extrapolation beyond the trained length and better
# short tasks than the Transformer, on par in long tasks, without any position encoding. Its larger block (Pro) adds
# norms of queries and keys, keys and values mixed with the token before, and an output gate. Take it where softmax
# attention should learn what to forget. If the state must not grow, take `gla` or `gated-deltanet`, whose gates shrink
# a state of constant size.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps; and the features of
# the page give the bias.


import proofs

import kinformer


def proof():
    names = {"inner.projection.qkv": "qkv", "inner.decay.gate": "gate", "inner.out": "out"}
    page = Attention(32, 4)
    x = torch.randn(2, 40, 32)
    proofs.compare(page, kinformer.layer("forgetting", 32, num_heads=4), names, x, page.step)
    q, k, v, log_f = page.project(x)
    wide_q, wide_k = with_features(q, k, log_f.cumsum(-1))
    y = F.scaled_dot_product_attention(wide_q, wide_k, v, is_causal=True, scale=1 / math.sqrt(q.shape[-1]))
    assert torch.allclose(y, parallel(q, k, v, log_f))


def train():
    return proofs.train(lambda: Attention(64, 4), __file__, positions=False)


def draw(figure, model):
    """Gates of the trained heads for each byte, the weight left in the slowest head, and texts beyond 128 tokens."""
    gates, left, bits = figure.subplots(1, 3)
    text = b"take it. leave it. then forget."
    layer = model.layers[0]
    with torch.no_grad():
        *_, log_f = layer.project(model.norms[0](model.embed(torch.tensor(list(text))[None])))
    slowest = log_f[0].mean(-1).argmax()
    c = log_f[0, slowest].cumsum(-1)
    gates.imshow(log_f[0].exp().T, vmin=0, vmax=1, aspect="auto")
    gates.set(title="gates (yellow: open)", xlabel="head")
    left.imshow((c[:, None] - c).exp().tril(), vmin=0, vmax=1)
    left.set(title=f"weight left, head {slowest}", xlabel="key", ylabel="query")
    for axes in (gates, left):
        axes.set_yticks(range(len(text)), text.decode().replace(" ", "_"), fontsize=6)
    bits.plot(torch.arange(32, 384, 64), proofs.bits_by_position(model, __file__, 384).view(-1, 64).mean(1))
    bits.axvline(128, color="grey", linestyle=":")
    bits.margins(y=1)
    bits.set(title="bits per byte", xlabel="position")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
