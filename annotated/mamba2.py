# # Mamba-2: a state space as attention
#
# *Paper: Dao, Gu: Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
# Duality (2024), arXiv 2405.21060. Members: `mamba2`. Measured: mqar, modern_lengths, delta_rules, causal_members.*
#
# **Problem.** State-space models run a linear system over a sequence, $h_t = A_t h_{t-1} + B_t x_t$, $y_t = C_t^\top
# h_t$. Mamba lets the token choose $A$, $B$ and $C$, but its scan of single numbers leaves the units for products of
# matrices idle, so its states must stay small.
#
# **Idea.** Let $A_t$ be one number $a_t$ for a whole head. Then the system is the recurrence of linear attention with a
# decay, where $C$ is the query, $B$ the key and $x$ the value, and it has a second form with a matrix $L$ of decays:
#
# $$ S_t = a_t S_{t-1} + B_t\, (\Delta_t x_t)^\top, \quad y_t = S_t^\top C_t + D x_t $$
#
# $$ Y = (L \circ C B^\top)\, (\Delta \circ X) + D X, \quad L_{ij} = a_{j+1} \cdots a_i \;\; (j \leq i) $$
#
# The two forms of one function are the duality of the title. States of 128 x 64 numbers become cheap.

import torch
from torch import nn
from torch.nn import functional as F

# ## Steps of time
#
# The system is continuous, $h' = -A h + B x$, and is run with a step $\Delta_t = \mathrm{softplus}(w \cdot x_t + b)$
# that the token chooses. A step decays the state by $a_t = \exp(-A \Delta_t)$ and adds $\Delta_t B_t x_t$. With a step
# near 0 a token neither fades the state nor enters it: the model skips the token. A long step does both. This coupling
# is the difference to other gated layers, where a token may enter without forgetting.
#
# Steps begin between 0.001 and 0.1, and rates $A$ between 0 and 16, both spread over the heads, so that heads begin
# with memories of many lengths.


class Steps(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.w = nn.Linear(dim, num_heads, bias=False)
        first = torch.logspace(-3, -1, num_heads)
        self.b = nn.Parameter(first.expm1().log())  # the inverse of softplus
        self.log_A = nn.Parameter(torch.linspace(1.0, 16.0, num_heads).log())

    def forward(self, x):
        """x [batch, time, dim] -> steps, and log a below 0, both [batch, heads, time]."""
        delta = F.softplus(self.w(x) + self.b).transpose(1, 2)
        return delta, -self.log_A.exp()[:, None] * delta


# ## First form: the system
#
# All heads share $B$ and $C$, as heads share keys and values in multi-query attention, but the other way round: each
# head has separate values, and one state of [state_dim, head_dim].


def recurrent(C, B, values, log_a, S):
    """C, B [batch, time, state_dim], values [batch, heads, time, head_dim], log_a [batch, heads, time], S [batch,
    heads, state_dim, head_dim] -> outputs in the shape of the values, and the last S."""
    outputs = []
    for t in range(C.shape[1]):
        S = log_a[:, :, t, None, None].exp() * S + B[:, None, t, :, None] * values[:, :, t, None, :]
        outputs.append((C[:, None, t, None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 2), S


# ## Second form: attention with a matrix of decays
#
# $\log L$ is a difference of cumulative sums, taken before the exponential, so that no product of decays underflows.
# $L$ is 0 above the diagonal; this is the causal mask, and the recurrence has it by itself. A softmax is missing, so
# the scores may be negative, and no sum of them can divide the outputs: a norm behind the heads sets their size.


def parallel(C, B, values, log_a, S):
    """The same function of the same tensors."""
    total = log_a.cumsum(-1)
    future = torch.ones(C.shape[1], C.shape[1], dtype=torch.bool).triu(1)
    L = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    outputs = (L * (C @ B.transpose(-2, -1))[:, None]) @ values + total.exp()[..., None] * (C[:, None] @ S)
    entered = L[..., -1, :, None] * B[:, None]
    return outputs, total[..., -1:, None].exp() * S + entered.transpose(-2, -1) @ values


# ## Third form: chunks
#
# The second form with the state of the chunk before is already the form for training: $T C$ comparisons in chunks of
# $C$ tokens, and $T / C$ states.


def chunked(C, B, values, log_a, S, size=16):
    outputs = []
    for c, b, value, log in zip(C.split(size, 1), B.split(size, 1), values.split(size, 2), log_a.split(size, 2)):
        y, S = parallel(c, b, value, log, S)
        outputs.append(y)
    return torch.cat(outputs, 2), S


# ## The layer
#
# One projection gives $C$, $B$ and $x$. A causal convolution over four tokens, each channel alone, and a silu follow,
# so that a key can name a place by the tokens before it. $D$ lets a head pass on its value. A gate stands before the
# norm here, and the norm runs over all heads together: heads may keep their relative sizes.


class Mamba2(nn.Module):
    def __init__(self, dim, num_heads, state_dim, head_dim):
        super().__init__()
        self.num_heads, self.state_dim, self.width = num_heads, state_dim, num_heads * head_dim
        channels = 2 * state_dim + self.width
        self.project, self.steps = nn.Linear(dim, channels, bias=False), Steps(dim, num_heads)
        # the row convolution[b] weighs the token b places back
        self.convolution = nn.Parameter(torch.empty(4, channels).uniform_(-0.5, 0.5))
        self.D, self.norm = nn.Parameter(torch.ones(num_heads)), nn.Parameter(torch.ones(self.width))
        self.gate, self.out = nn.Linear(dim, self.width, bias=False), nn.Linear(self.width, dim, bias=False)

    def step(self, x, state=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state: S and
        the last three tokens before the convolution."""
        head_dim = self.width // self.num_heads
        S, recent = state or (
            x.new_zeros(len(x), self.num_heads, self.state_dim, head_dim),
            x.new_zeros(len(x), 3, self.convolution.shape[1]),
        )
        tokens = torch.cat([recent, self.project(x)], 1)
        mixed = F.silu(sum(self.convolution[b] * tokens[:, 3 - b :][:, : x.shape[1]] for b in range(4)))
        C, B, values = mixed.split([self.state_dim, self.state_dim, self.width], -1)
        values = values.unflatten(-1, (self.num_heads, head_dim)).transpose(1, 2)
        delta, log_a = self.steps(x)
        y, S = form(C, B, delta[..., None] * values, log_a, S)
        y = (y + self.D[:, None, None] * values).transpose(1, 2).flatten(2)
        y = F.rms_norm(y * F.silu(self.gate(x)), (self.width,), self.norm, eps=1e-6)
        return self.out(y), (S, tokens[:, -3:])

    def forward(self, x):
        return self.step(x, form=chunked)[0]


# ## Costs, and when to take it
#
# A head stores $128 \times 64 = 8{,}192$ numbers at the paper's sizes, and the layer the last three tokens before the
# convolution, at any length; one more token reads and writes them once. With $A = 0$ and without the convolution the
# layer is linear attention without a denominator; it reaches softmax attention in no limit. The paper claims a scan 2
# to 8 times as fast as Mamba's and the quality of Transformer++ and Mamba up to 2.7 billion parameters. Our result page
# "modern_lengths" measures a training step at 32,768 tokens at 0.07 of the time of softmax attention, and "delta_rules"
# 0.55 of the time of Gated DeltaNet. "mqar" measures 99 % of 8 pairs recalled after 900 steps (softmax attention 800).
# On text, in a minute and a half of one thread, it ends at 2.135 bits per byte where `gpt` has 2.071
# ("causal_members"): its layer of width 2 x dim makes fewer steps.
#
# Take it for long signals and cheap training. Do not take it where facts are overwritten (`gated-deltanet` erases).

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    page = Mamba2(32, 4, 8, 16)
    with torch.no_grad():
        page.D.uniform_(-1, 1)
    library = kinformer.layer("mamba2", 32, num_heads=4, head_dim=8, value_dim=16)
    names = {
        "inner.qkv": "project",
        "inner.convolution.weight": lambda weights: weights["convolution"][:, None],
        "inner.decay.gate": "steps.w",
        "inner.decay.step": "steps.b",
        "inner.decay.log_rate": "steps.log_A",
        "inner.skip": "D",
        "inner.norm.weight": lambda weights: weights["norm"].view(4, 16),
        "inner.gate": "gate",
        "inner.out": "out",
    }
    x = torch.randn(2, 30, 32)
    proofs.compare(page, library, names, x, page.step)
    proofs.equal("all pairs", page.step(x, form=parallel)[0], library(x))


def train():
    return proofs.train(lambda: Mamba2(64, 4, 16, 32), __file__)


def draw(figure, model):
    """The matrix L of decays and the weights L * (C B^T) of trained heads, and the steps of time over a text."""
    text = b"a long step enters the state; a short step skips the token"
    x = model.norms[0](model.embed(torch.tensor(list(text))[None]))
    layer = model.layers[0]
    delta, log_a = (item.detach() for item in layer.steps(x))
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.8, 1))
    time = x.shape[1]
    for head, axes in enumerate(top.subplots(1, 4)):
        total = log_a[0, head].cumsum(-1)
        axes.imshow((total[:, None] - total).clamp(max=0).exp().tril(), vmin=0, vmax=1)
        axes.set_title(f"L, head {head}", fontsize="medium")
    axes = bottom.subplots()
    image = axes.imshow(delta[0].log10(), aspect="auto", cmap="magma")
    axes.set(ylabel="head", yticks=(0, 3), xticks=range(time), xticklabels=text.decode())
    axes.set_title("log10 of the steps", fontsize="medium")
    bottom.colorbar(image, ax=axes)


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
