# # RetNet: retention
#
# *Paper: Sun, Dong, Huang, Ma, Xia, Xue, Wang, Wei: Retentive Network: A Successor to Transformer for Large Language
# Models (2023), arXiv 2307.08621. Members: `retnet`. Measured: mqar_16, kernel_attention.*
#
# **Problem.** Linear attention trains in parallel and generates from a constant state, but its sum of the past never
# fades. Outputs of long texts are dominated by the bulk of old tokens, and order within the past is lost.
#
# **Idea.** Let the state shrink by a fixed factor $\gamma$ with every token, and turn queries and keys by an angle that
# grows with the position. Distance then enters twice, as a decay and as a rotation $\Theta$:
#
# $$ S_n = \gamma S_{n-1} + (k_n e^{i n \theta})\, v_n^\top, \quad
#    y_n = S_n^\top (q_n e^{i n \theta})^{*} = \sum_{m \leq n} \gamma^{n-m}\, (q_n \cdot R_{n-m} k_m)\, v_m $$
#
# Here $*$ is the complex conjugate, $R_{n-m}$ turns by $(n - m)\,\theta$, and real parts are read. Each head has
# another $\gamma$, so some heads remember 20 tokens and others many hundreds.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Rotation and decay
#
# Neighbouring pairs of features are the real and the imaginary part of a complex number; pair $c$ turns by $\theta_c =
# 10000^{-2c/d}$ for each position. The product of a query and a key depends on the difference of their angles only, so
# positions need no limit.
#
# The decay of head $h$ is $\gamma_h = 1 - 2^{-5-h}$ (equation 8): half of the state is left after 22, 44, 88, ...
# tokens. The decays are constants, not weights.


def rotate(x, positions):
    """x [batch, heads, time, head_dim], positions [time] -> x turned by the angles of its positions."""
    head_dim = x.shape[-1]
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def decays(num_heads):
    return 1 - 2.0 ** (-5 - torch.arange(num_heads))


# ## First form: parallel
#
# The weights are products of queries and keys times the decays of all distances, $D_{nm} = \gamma^{n-m}$. A softmax is
# missing, so weights have either sign and no sum.


def parallel(q, k, v):
    """q, k [batch, heads, time, head_dim], v [batch, heads, time, value_dim] -> the shape of v."""
    time = torch.arange(q.shape[2])
    D = (decays(q.shape[1])[:, None, None] ** (time[:, None] - time).clamp_min(0)).tril()
    return (q @ k.transpose(-2, -1) * D) @ v


# ## Second form: recurrent
#
# The state is one matrix for each head.


def recurrent(q, k, v, S):
    """The same function one token at a time; S [batch, heads, head_dim, value_dim] -> outputs, and the last S."""
    gamma, outputs = decays(q.shape[1])[:, None, None], []
    for n in range(q.shape[2]):
        S = gamma * S + k[:, :, n, :, None] * v[:, :, n, None, :]
        outputs.append((q[:, :, n, None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 2), S


# ## Third form: chunks
#
# Inside a chunk retention is parallel. The state of earlier chunks is read with $\gamma^{n+1}$ by token $n$ of the
# chunk; key $m$ of a chunk of $C$ tokens enters the next state with $\gamma^{C-1-m}$. Long texts are trained in this
# form.


def chunked(q, k, v, S, size=8):
    gamma, outputs = decays(q.shape[1])[:, None, None], []
    for queries, keys, values in zip(q.split(size, 2), k.split(size, 2), v.split(size, 2)):
        n = torch.arange(queries.shape[2])[:, None]
        outputs.append(parallel(queries, keys, values) + gamma ** (n + 1) * (queries @ S))
        S = gamma ** len(n) * S + (gamma ** (len(n) - 1 - n) * keys).transpose(-2, -1) @ values
    return torch.cat(outputs, 2), S


# ## The layer
#
# The outputs of heads differ in size, as heads with slow decays sum more tokens. A norm of every head makes them equal,
# and it also undoes any factor of a row: this norm is the reason that retention works without a denominator. A gate,
# $\mathrm{silu}(W_g x)$, adds the non-linearity that the softmax would give. Values are twice as wide as keys in the
# paper, which doubles the state.


class Retention(nn.Module):
    def __init__(self, dim, num_heads, value_dim):
        super().__init__()
        self.num_heads, self.head_dim, self.value_dim = num_heads, dim // num_heads, value_dim
        self.qkv = nn.Linear(dim, 2 * dim + num_heads * value_dim, bias=False)
        self.gate = nn.Linear(dim, num_heads * value_dim, bias=False)
        self.out = nn.Linear(num_heads * value_dim, dim, bias=False)

    def project(self, x, positions):
        q, k, v = self.qkv(x).split([self.num_heads * self.head_dim] * 2 + [self.num_heads * self.value_dim], -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        return rotate(q, positions), rotate(k, positions), v

    def write(self, y, x):
        y = F.layer_norm(y / math.sqrt(self.head_dim), y.shape[-1:]).transpose(1, 2).flatten(2)
        return self.out(F.silu(self.gate(x)) * y)

    def forward(self, x):
        """x [batch, time, dim] -> the same shape."""
        return self.write(parallel(*self.project(x, torch.arange(x.shape[1]))), x)

    def step(self, x, state=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state: S and
        the number of tokens."""
        S, seen = state or (x.new_zeros(len(x), self.num_heads, self.head_dim, self.value_dim), 0)
        y, S = form(*self.project(x, seen + torch.arange(x.shape[1])), S)
        return self.write(y, x), (S, seen + x.shape[1])


# ## Costs, and when to take it
#
# A head of 64 with values of 128 stores 8,192 numbers, as softmax attention after 64 tokens; one more token reads and
# writes them once. `tril` and the recurrence keep causality. A norm over time or over the batch, in the place of the
# norm over a head, would break it. With $\gamma = 1$ and without the rotation retention is linear attention without a
# denominator; it reaches softmax attention in no limit.
#
# The paper claims the quality of a Transformer from 2 billion parameters on, decoding 8.4 times as fast and 70 % less
# memory at 8,192 tokens with 7 billion parameters. Our result page "kernel_attention" measures forward and backward
# over 4,096 tokens at 0.12 of the time of softmax attention. "mqar_16" measures recall: 66 % of 16 pairs after 2,000
# steps, where `gla`, whose decays the text decides, has 99 % after 1,200.
#
# Take it for a constant state over any length with the simplest decay. Do not take it where the text should say what to
# forget: heads forget by the clock.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    page = Retention(32, 4, 16)
    library = kinformer.layer("retnet", 32, num_heads=4, value_dim=16)
    x = torch.randn(2, 30, 32)
    proofs.compare(page, library, {"inner.qkv": "qkv", "inner.gate": "gate", "inner.out": "out"}, x, page.step)
    proofs.equal("chunked", page.step(x, form=chunked)[0], library(x))


def train():
    return proofs.train(lambda: Retention(64, 4, 32), __file__)


def draw(figure, model):
    """The weights of trained heads with their decays, and the decays of all heads by distance."""
    text = b"each head forgets at its own pace, by the clock, whatever the text may say"
    x = model.embed(torch.tensor(list(text))[None])
    layer = model.layers[0]
    q, k, _ = layer.project(model.norms[0](x), torch.arange(x.shape[1]))
    weights = parallel(q, k, torch.eye(x.shape[1])[None, None].expand(1, 4, -1, -1))[0].detach()
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
    for head, axes in zip((0, 3), panels):
        largest = weights[head].abs().max()
        axes.imshow(weights[head], vmin=-largest, vmax=largest, cmap="RdBu")
        axes.set_title(f"head {head}", fontsize="medium")
        axes.set(xlabel="key", ylabel="query")
    for head, gamma in enumerate(decays(4)):
        panels[2].semilogx(gamma ** torch.arange(1, 1001), label=f"head {head}: {math.log(0.5) / gamma.log():.0f}")
    panels[2].set_title("decay, and half-life", fontsize="medium")
    panels[2].set(xlabel="tokens later")
    panels[2].legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
