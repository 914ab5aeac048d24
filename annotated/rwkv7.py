# # RWKV-7: erase under one key, write under another
#
# *Paper: Peng et al.: RWKV-7 "Goose" with Expressive Dynamic State Evolution (2025), arXiv 2503.14456. Members:
# `rwkv7`. Measured: mqar, delta_rules, modern_lengths, causal_members.*
#
# **Problem.** The delta rule erases under the same key that it writes, with one strength for the whole key. A model may
# want to erase one thing and write another, and it may want to do so in some channels only.
#
# **Idea.** Separate the three acts. Every channel has a decay $w$; the state is erased under a key $\kappa$ of length 1
# with a rate $a$ for each channel; and a value is written under a third key $\tilde{k}$:
#
# $$ S_t = (\mathrm{diag}(w_t) - (a_t \circ \kappa_t)\, \kappa_t^\top)\, S_{t-1} + \tilde{k}_t v_t^\top $$
#
# $$ y_t = W_o (g_t \circ (\mathrm{norm}(S_t^\top r_t) + (r_t \cdot (\rho \circ \tilde{k}_t))\, v_t)) $$
#
# $r$ is the query ("receptance"). The second term reads the token's own value with weights $\rho$. With $\tilde{k} = a
# \circ \kappa$ and $w = 1$ this is the delta rule.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Token shift and small networks
#
# Every input is a mixture of a token and the token before, with a learned share for each channel: $x' = x_t + \mu
# (x_{t-1} - x_t)$. It lets one layer form keys of two tokens. Decays, rates and gates come from networks of low rank,
# which cost few weights.


def shift(x, last):
    """x [batch, time, dim] behind the token `last` [batch, 1, dim] -> the token before each, and the new last token."""
    x = torch.cat([x.new_zeros(len(x), 1, x.shape[2]) if last is None else last, x], 1)
    return x[:, :-1], x[:, -1:]


def low_rank(dim, rank, activation=nn.Identity, bias=True):
    return nn.Sequential(nn.Linear(dim, rank, bias=False), activation(), nn.Linear(rank, dim, bias=bias))


# ## First form: a state
#
# $\kappa$ reads the state before it decays. Its length is 1, so that the rate $a$ alone says how much is erased. The
# matrix in front of $S_{t-1}$ is not diagonal, and its eigenvalue along $\kappa$ is near $w - a$, which may be
# negative. So the state can swap and count, which no decay can.


def recurrent(r, log_w, kappa, a, k, v, S):
    """r, log_w, kappa, a, k, v [batch, heads, time, head_dim], S [batch, heads, head_dim, head_dim] -> outputs, S."""
    outputs = []
    for t in range(r.shape[2]):
        erased = (a * kappa)[:, :, t, :, None] * (kappa[:, :, t, None, :] @ S)
        S = log_w[:, :, t, :, None].exp() * S - erased + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((r[:, :, t, None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 2), S


# ## Second form: chunks
#
# Call $e_t = S_{t-1}^\top \kappa_t$ the values read for erasing. $S_t$ is the sum of what was written and erased, faded
# since. With $B_t = \log w_1 + \ldots + \log w_t$ from the start of a chunk:
#
# $$ e_t = S_0^\top \kappa'_t + \sum_{j < t} (\kappa'_t \cdot \tilde{k}_j e^{-B_j})\, v_j - \sum_{j < t} (\kappa'_t
#    \cdot (a \circ \kappa)_j e^{-B_j})\, e_j, \quad \kappa'_t = \kappa_t \circ e^{B_{t-1}} $$
#
# This is a triangular system for all $e_t$ of a chunk. It is safe because the decay is bounded: $\log w \geq -e^{-1/2}
# = -0.61$, so in 16 tokens $e^{-B}$ is $e^{9.7}$ at most.


def chunked(r, log_w, kappa, a, k, v, S, size=16):
    """The same function of the same tensors."""
    outputs = []
    for tokens in zip(*(x.split(size, 2) for x in (r, log_w, kappa, a * kappa, k, v))):
        r, log_w, kappa, erased, k, v = tokens
        B = log_w.cumsum(2)
        r, kappa, fade = r * B.exp(), kappa * (B - log_w).exp(), (B[:, :, -1:] - B).exp()
        key, erase = ((x * (-B).exp()).transpose(-2, -1) for x in (k, erased))
        system = torch.eye(r.shape[2]) + (kappa @ erase).tril(-1)
        e = torch.linalg.solve_triangular(system, (kappa @ key).tril(-1) @ v + kappa @ S, upper=False)
        outputs.append((r @ key).tril() @ v - (r @ erase).tril() @ e + r @ S)
        S = B[:, :, -1, :, None].exp() * S + (k * fade).transpose(-2, -1) @ v - (erased * fade).transpose(-2, -1) @ e
    return torch.cat(outputs, 2), S


# ## Time mixing
#
# The rate $a$ decides in each channel how much is erased and, by $\alpha$, how much of the key is written instead.
# Later layers mix their values with the values of the first layer: `first`. A norm of each head sets the size of
# outputs. A sum of weights cannot, as products have either sign.


class TimeMix(nn.Module):
    def __init__(self, dim, num_heads, rank):
        super().__init__()
        self.num_heads = num_heads
        self.mu = nn.Parameter(torch.rand(6, dim))
        self.r, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w, self.a, self.nu = low_rank(dim, rank, nn.Tanh), low_rank(dim, rank), low_rank(dim, rank)
        self.g = low_rank(dim, rank, nn.Sigmoid, bias=False)
        self.xi, self.alpha, self.rho = (nn.Parameter(torch.rand(dim)) for _ in range(3))
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        nn.init.uniform_(self.w[2].bias, -5.0, 1.0)  # decays from slow to fast

    def step(self, x, state=None, first=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs, the next state, and the values."""
        S, last = state or (x.new_zeros(len(x), self.num_heads, *2 * [x.shape[2] // self.num_heads]), None)
        before, last = shift(x, last)
        xr, xw, xk, xv, xa, xg = x + self.mu[:, None, None] * (before - x)
        log_w, a, v, k = -math.exp(-0.5) * self.w(xw).sigmoid(), self.a(xa).sigmoid(), self.v(xv), self.k(xk)
        first = v if first is None else first
        v = v + (first - v) * self.nu(xv).sigmoid()
        written = k * (1 + (a - 1) * self.alpha)
        parts = (self.r(xr), log_w, k * self.xi, a, written, v, written * self.rho)
        r, log_w, kappa, a, k, v, bonus = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts)
        y, S = form(r, log_w, F.normalize(kappa, dim=-1), a, k, v, S)
        bonus = ((r * bonus).sum(-1, keepdim=True) * v).transpose(1, 2).flatten(2)
        y = F.layer_norm(y, y.shape[-1:], eps=1e-5 * y.shape[-1]).transpose(1, 2).flatten(2)
        return self.out(self.g(xg) * (y * self.norm_weight + self.norm_bias + bonus)), (S, last), first

    def forward(self, x):
        return self.step(x, form=chunked)[0]


# ## Channel mixing
#
# The feed-forward of a layer is shifted too, and its ReLU is squared.


class ChannelMix(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.mu = nn.Parameter(torch.rand(dim))
        self.up, self.down = nn.Linear(dim, hidden_dim, bias=False), nn.Linear(hidden_dim, dim, bias=False)

    def step(self, x, last=None):
        before, last = shift(x, last)
        return self.down(self.up(x + self.mu * (before - x)).relu().square()), last


# ## Costs, and when to take it
#
# A head of 64 stores 4,096 numbers, and time mixing and channel mixing each store the last token they read. One more
# token reads and writes the state once. The shift looks back; a shift from the next token would break causality. The
# layer reaches softmax attention in no limit. The paper claims that such states track all regular languages, and that
# softmax attention of constant depth cannot under standard conjectures. Our result page "mqar" measures 99 % of 8 pairs
# after 800 steps, as softmax attention; "delta_rules" 2.4 times the time of Gated DeltaNet; "modern_lengths" 0.24 of
# softmax attention's time at 32,768 tokens. On text it ends at 2.105 bits per byte where `gpt` has 2.071 in equal
# minutes ("causal_members"). Take it where a state must follow changes in the text. Do not take it where training speed
# decides.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer

NAMES = {
    "shift": "mu",
    "decay_down": "w.0",
    "decay_up": "w.2",
    "decay_bias": "w.2.bias",
    "rate_down": "a.0",
    "rate_up": "a.2",
    "rate_bias": "a.2.bias",
    "gate_down": "g.0",
    "gate_up": "g.2",
    "first_values.down": "nu.0",
    "first_values.up": "nu.2",
    "first_values.bias": "nu.2.bias",
    "erased": "xi",
    "replaced": "alpha",
    "bonus": "rho",
} | {name: name for name in ("r", "k", "v", "out", "norm_weight", "norm_bias")}


class TwoLayers(nn.Module):
    """Two whole layers; the second mixes its values with the values of the first."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])
        self.time_mixes = nn.ModuleList([TimeMix(32, 4, 8) for _ in range(2)])
        self.channel_mixes = nn.ModuleList([ChannelMix(32, 64) for _ in range(2)])

    def step(self, x, states=None, form=recurrent):
        states, first = list(states or 4 * [None]), None
        for i, (time_mix, channel_mix) in enumerate(zip(self.time_mixes, self.channel_mixes)):
            y, states[2 * i], first = time_mix.step(self.norms[2 * i](x), states[2 * i], first, form)
            x = x + y
            y, states[2 * i + 1] = channel_mix.step(self.norms[2 * i + 1](x), states[2 * i + 1])
            x = x + y
        return x, states

    def forward(self, x):
        return self.step(x, form=chunked)[0]


def proof():
    settings = {f"{part}_rank": 8 for part in ("decay", "rate", "gate", "value")}
    print("time mixing")
    page, library = TimeMix(32, 4, 8), kinformer.layer("rwkv7", 32, num_heads=4, set=settings)
    names = {f"inner.{there}": here for there, here in NAMES.items()}
    x = torch.randn(2, 40, 32)
    proofs.compare(page, library, names, x, lambda chunk, state: page.step(chunk, state)[:2])
    print("two layers")
    settings = {f"mixer.{name}": rank for name, rank in settings.items()} | {"feed_forward.hidden_dim": 64}
    layers = [kinformer.layer("rwkv7", 32, whole=True, num_heads=4, set=settings) for _ in range(2)]
    page, library, names = TwoLayers(), kinformer.nn.stack(layers, 32), {}
    for i in range(2):
        within = f"inner.stack.layers.{i}."
        names |= {f"{within}mixer.{there}": f"time_mixes.{i}.{here}" for there, here in NAMES.items()}
        names |= {f"{within}feed_forward.{part}": f"channel_mixes.{i}.{part}" for part in ("up", "down")}
        names |= {f"{within}feed_forward.shift": f"channel_mixes.{i}.mu"}
        for j, part in enumerate(("mixer", "feed_forward")):
            names[f"{within}{part}_residual.norm"] = f"norms.{2 * i + j}"
    proofs.compare(page, library, names, x, page.step)


def train():
    return proofs.train(lambda: TimeMix(64, 4, 16), __file__)


def draw(figure, model):
    """Decays and rates of a trained head over a text, and the eigenvalues of the matrices that move its state."""
    text = b"erase one thing, and write another"
    x = model.norms[0](model.embed(torch.tensor(list(text))[None]))
    seen = {}

    def record(r, log_w, kappa, a, k, v, S):
        seen.update(w=log_w[0, 0].exp().detach(), a=a[0, 0].detach(), kappa=kappa[0, 0].detach())
        return recurrent(r, log_w, kappa, a, k, v, S)

    model.layers[0].step(x, form=record)
    left, right = figure.subfigures(1, 2, width_ratios=(1.4, 1))
    for axes, name in zip(left.subplots(2, 1), ("w", "a")):
        order = seen[name].median(0).values.argsort()
        image = axes.imshow(seen[name][:, order].T, aspect="auto", vmin=0, vmax=1)
        axes.set(ylabel="channel", xticks=range(len(text)), xticklabels=text.decode())
        axes.set_title({"w": "kept of a channel, w", "a": "rate of erasing, a"}[name], fontsize="medium")
    left.colorbar(image, ax=left.axes)
    erased = (seen["a"] * seen["kappa"])[:, :, None] * seen["kappa"][:, None]
    values = torch.linalg.eigvals(torch.diag_embed(seen["w"]) - erased).flatten()
    axes = right.subplots()
    axes.hist([seen["w"].flatten(), values.real], bins=30, label=["diag(w) alone", "with erasing"])
    axes.set(xlabel="eigenvalue (real part)", yscale="log")
    axes.set_title("matrices that move the state", fontsize="medium")
    axes.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
