# # Gated DeltaNet-2: erase and write by their own gates
#
# *Paper: Hatamizadeh, Choi, Kautz: Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention (2026), arXiv
# 2605.22791. Members: `gdn2`. Measured: delta_rules.*
#
# **Problem.** In the delta rule one number $\beta_t$ says two things: how much of the value under a key is erased, and
# how much of the new value is written. Kimi Delta Attention (the page `kda`) fades each channel of the keys by itself,
# but it still edits all channels by this one number. A token cannot clear half of a slot, or write half of a value.
#
# **Idea.** Give each channel its own gate on both sides: $b_t$ on the channels of the key chooses what to read and
# erase, $w_t$ on the channels of the value chooses what to write. The decay $\alpha_t$ by channel stays:
#
# $$ S_t = (I - k_t (b_t \circ k_t)^\top)\, \mathrm{diag}(\alpha_t)\, S_{t-1} + k_t (w_t \circ v_t)^\top, \quad
#    y_t = S_t^\top q_t / \sqrt{d} $$
#
# Where $b_t$ and $w_t$ are the same number in all channels it is Kimi Delta Attention, and with one decay for all
# channels Gated DeltaNet.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The decay and the gates
#
# The decay is a step of time $\mathrm{softplus}(W_2 W_1 x + c)$ for each channel, times a rate $A$ for each head; with
# a lower bound $l < 0$ it is $\log \alpha = l\, \sigma(A (W_2 W_1 x + c))$ instead, which keeps chunks in the range of
# float32. The gates are $b = \sigma(W_b x)$ and $w = \sigma(W_w x)$, of full rank, so they have as many weights as keys
# and values. The matrix $I - k (b \circ k)^\top$ has the eigenvalue $1 - \sum_c b_c k_c^2$ along $k$ and 1 elsewhere.
# Keys have length 1 and $b$ lies in (0, 1), so this eigenvalue lies in (0, 1); with $b$ in (0, 2) it may be negative.


class Decay(nn.Module):
    def __init__(self, dim, num_heads, head_dim, lower_bound=None):
        super().__init__()
        self.lower_bound = lower_bound
        self.down, self.up = nn.Linear(dim, head_dim, bias=False), nn.Linear(head_dim, num_heads * head_dim, bias=False)
        self.c = nn.Parameter(torch.linspace(-7.0, -2.3, head_dim).repeat(num_heads, 1))
        self.log_A = nn.Parameter(torch.linspace(1.0, 16.0 if lower_bound is None else 1.0, num_heads).log())

    def forward(self, x):
        """x [batch, time, dim] -> log alpha [batch, heads, time, head_dim], below 0."""
        steps = (self.up(self.down(x)).unflatten(-1, self.c.shape) + self.c).transpose(1, 2)
        A = self.log_A.exp()[:, None, None]
        return -A * F.softplus(steps) if self.lower_bound is None else self.lower_bound * (A * steps).sigmoid()


# ## First form: a state
#
# Fade, read under the erasing key $e_t = b_t \circ k_t$, write the difference under $k_t$, read. The only new thing
# beside Kimi Delta Attention is that the key that reads is not the key that writes.


def recurrent(q, k, v, e, log_alpha, S):
    """q, k, e, log_alpha and v, with its gate, [batch, heads, time, head_dim], S [batch, heads, head_dim, head_dim] ->
    outputs in the shape of v, and the last S."""
    outputs = []
    for t in range(q.shape[2]):
        S = log_alpha[:, :, t, :, None].exp() * S
        erased = (S * e[:, :, t, :, None]).sum(-2)
        S = S + k[:, :, t, :, None] * (v[:, :, t] - erased)[..., None, :]
        outputs.append((q[:, :, t, None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 2), S


# ## Second form: chunks
#
# With $B_t = \log \alpha_1 + \ldots + \log \alpha_t$ from the start of a chunk, the corrections $u$ of a chunk solve a
# triangular system, whose matrix mixes two kinds of keys:
#
# $$ u_t = w_t \circ v_t - S_0^\top (e_t \circ e^{B_t}) - \sum_{j < t} \left((e_t \circ e^{B_t}) \cdot (k_j \circ
#    e^{-B_j})\right) u_j $$
#
# Chunks are short, so that $e^{-B}$ fits into a number. This is the form for training: products of matrices, and one
# system of the size of a chunk.


def chunked(q, k, v, e, log_alpha, S, size=16):
    """The same function of the same tensors."""
    outputs = []
    for q_, k_, v_, e_, logs in zip(*(x.split(size, 2) for x in (q, k, v, e, log_alpha))):
        B = logs.cumsum(2)
        query, erasing, written = q_ * B.exp(), e_ * B.exp(), (k_ * (-B).exp()).transpose(-2, -1)
        system = torch.eye(k_.shape[2]) + (erasing @ written).tril(-1)
        u = torch.linalg.solve_triangular(system, v_ - erasing @ S, upper=False)
        outputs.append((query @ written).tril() @ u + query @ S)
        last = B[:, :, -1:]
        S = last.transpose(-2, -1).exp() * S + (k_ * (last - B).exp()).transpose(-2, -1) @ u
    return torch.cat(outputs, 2), S


# ## The layer
#
# Around the rule stands Kimi Delta Attention's layer: a convolution over four tokens, queries and keys of length 1, a
# norm of every head in the place of a denominator, which may be near 0 where products have either sign, and a gate of
# low rank. The state is S and the last three tokens before the convolution. Every part reads tokens up to $t$ only.


class GatedDeltaNet2(nn.Module):
    def __init__(self, dim, num_heads, gate_rank, largest=1, lower_bound=None):
        super().__init__()
        self.num_heads, self.d, self.largest = num_heads, dim // num_heads, largest
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        # the row convolution[b] weighs the token b places back
        self.convolution = nn.Parameter(torch.empty(4, num_heads, 3 * self.d).uniform_(-0.5, 0.5))
        self.decay, self.norm = Decay(dim, num_heads, self.d, lower_bound), nn.Parameter(torch.ones(self.d))
        self.b, self.w = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_down, self.gate_up = nn.Linear(dim, gate_rank, bias=False), nn.Linear(gate_rank, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, self.d)).transpose(1, 2)

    def step(self, x, state=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        shape, time = (len(x), self.num_heads), x.shape[1]
        S, recent = state or (x.new_zeros(*shape, self.d, self.d), x.new_zeros(*shape, 3, 3 * self.d))
        projected = torch.cat([self.heads(part) for part in self.qkv(x).chunk(3, -1)], -1)
        tokens = torch.cat([recent, projected], 2)
        mixed = sum(self.convolution[b][:, None] * tokens[:, :, 3 - b :][:, :, :time] for b in range(4))
        q, k, v = F.silu(mixed).split(self.d, -1)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        erasing, written = self.largest * self.heads(self.b(x)).sigmoid() * k, self.heads(self.w(x)).sigmoid() * v
        y, S = form(q / math.sqrt(self.d), k, written, erasing, self.decay(x), S)
        y = F.rms_norm(y, (self.d,), self.norm, eps=1e-6).transpose(1, 2).flatten(2)
        return self.out(y * self.gate_up(self.gate_down(x)).sigmoid()), (S, tokens[:, :, -3:])

    def forward(self, x):
        return self.step(x, form=chunked)[0]


# ## Costs, and when to take it
#
# A head of 128 stores 16,384 numbers and 1,152 for the convolution, as softmax attention after 69 tokens: as much as
# Kimi Delta Attention, and one more token reads and writes them once. The two gates cost $2\, \mathrm{dim}^2$ weights
# and products. Our result page "delta_rules" measures 1.17 times the time of Gated DeltaNet for the rule without its
# projections, forward and backward of 4,096 tokens, where Kimi Delta Attention takes 1.05. The paper claims, at 1.3
# billion parameters and 100 billion tokens, 53.1 % on average of its language tasks, where Kimi Delta Attention has
# 52.3 %, and the largest gains where a long text holds several keys to look up. The layer reaches softmax attention in
# no limit, so hybrids mix both. Take it where Kimi Delta Attention fits and parameters are not short.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.qkv": "qkv",
        "inner.convolution.weight": "convolution",
        "inner.decay.down": "decay.down",
        "inner.decay.up": "decay.up",
        "inner.decay.step": "decay.c",
        "inner.decay.log_rate": "decay.log_A",
        "inner.rule.erasing": "b",
        "inner.rule.writing": "w",
        "inner.norm.weight": "norm",
        "inner.gate.down": "gate_down",
        "inner.gate.up": "gate_up",
        "inner.out": "out",
    }
    for largest, lower_bound in ((1, None), (2, -5.0)):
        print(f"erasing gate below {largest}, lower bound {lower_bound}")
        page = GatedDeltaNet2(32, 4, 8, largest, lower_bound)
        settings = {"gate_rank": 8, "negative_eigenvalues": largest == 2, "decay.lower_bound": lower_bound}
        library = kinformer.layer("gdn2", 32, num_heads=4, set=settings)
        proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)


def train():
    return proofs.train(lambda: GatedDeltaNet2(64, 4, 16, lower_bound=-5.0), __file__)


def draw(figure, model):
    """The two gates of one head in a trained layer, channel by channel over a text."""
    text = b"erase one half of a slot, write one half of a value"
    x = model.norms[0](model.embed(torch.tensor(list(text))[None]))
    layer = model.layers[0]
    gates = [layer.heads(gate(x)).sigmoid()[0].detach() for gate in (layer.b, layer.w)]
    head = int((gates[0] - gates[1]).var(1).sum(1).argmax())
    for axes, gate, title in zip(figure.subplots(2, 1), gates, ("erased, b", "written, w")):
        rows = gate[head].T[gate[head].mean(0).argsort()]
        image = axes.imshow(rows, aspect="auto", vmin=0, vmax=1)
        axes.set(title=f"{title}, head {head}", ylabel="channel, sorted", xticks=range(len(text)))
        axes.set_xticklabels(text.decode())
    figure.colorbar(image, ax=figure.axes)


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
