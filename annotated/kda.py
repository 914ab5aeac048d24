# # Kimi Delta Attention: a decay for every channel
#
# *Paper: Kimi Team: Kimi Linear: An Expressive, Efficient Attention Architecture (2025), arXiv 2510.26692. Members:
# `kda`. Measured: mqar, mqar_16, delta_rules, modern_lengths, causal_members.*
#
# **Problem.** Gated DeltaNet (the page `gated_deltanet`) forgets a whole head at once: one number $\alpha_t$ fades
# every key. A head must choose whether it is a short or a long memory.
#
# **Idea.** Give every channel of the keys its own decay, as in gated linear attention (the page `gla`), and keep the
# delta rule. $\alpha_t$ is a vector:
#
# $$ S_t = (I - \beta_t k_t k_t^\top)\, \mathrm{diag}(\alpha_t)\, S_{t-1} + \beta_t k_t v_t^\top, \quad
#    y_t = S_t^\top q_t / \sqrt{d} $$
#
# The state fades first, and then the key reads the faded state, so the value at $k_t$ after a step with $\beta_t = 1$
# is exactly $v_t$. In models, three layers of this kind are followed by one layer of softmax attention without
# positions: the decays tell tokens their order.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The decays
#
# A step of time $\mathrm{softplus}(W_2 W_1 x + b)$ for each channel, times a rate $A$ for each head. $W_2 W_1$ has the
# rank of a head. A later version of the authors bounds the logarithm from below, $\log \alpha = l\, \sigma(A (W_2 W_1 x
# + b))$ with $l = -5$. The second form is then safe: in 16 tokens a channel fades to $e^{-80}$ at most, and float32
# still holds the inverse.


class Decay(nn.Module):
    def __init__(self, dim, num_heads, head_dim, lower_bound=None):
        super().__init__()
        self.lower_bound = lower_bound
        self.down, self.up = nn.Linear(dim, head_dim, bias=False), nn.Linear(head_dim, num_heads * head_dim, bias=False)
        self.b = nn.Parameter(torch.linspace(-7.0, -2.3, head_dim).repeat(num_heads, 1))
        self.log_A = nn.Parameter(torch.linspace(1.0, 16.0 if lower_bound is None else 1.0, num_heads).log())

    def forward(self, x):
        """x [batch, time, dim] -> log alpha [batch, heads, time, head_dim], below 0."""
        steps = (self.up(self.down(x)).unflatten(-1, self.b.shape) + self.b).transpose(1, 2)
        A = self.log_A.exp()[:, None, None]
        return -A * F.softplus(steps) if self.lower_bound is None else self.lower_bound * (A * steps).sigmoid()


# ## First form: a state
#
# Three operations on one matrix for each head: fade its rows, replace the value of one key, read.


def recurrent(q, k, v, beta, log_alpha, S):
    """q, k, v, log_alpha [batch, heads, time, head_dim], beta [batch, heads, time], S [batch, heads, head_dim,
    head_dim] -> outputs in the shape of v, and the last S."""
    outputs = []
    for t in range(q.shape[2]):
        key, query = k[:, :, t, :, None], q[:, :, t, None, :]
        S = log_alpha[:, :, t, :, None].exp() * S
        difference = v[:, :, t] - (S * key).sum(-2)
        S = S + key * (beta[:, :, t, None] * difference)[..., None, :]
        outputs.append((query @ S)[..., 0, :])
    return torch.stack(outputs, 2), S


# ## Second form: chunks
#
# With $B_t = \log \alpha_1 + \ldots + \log \alpha_t$ from the start of a chunk, key $j$ reaches token $t$ through
# $\sum_c k_{tc} k_{jc} \exp(B_{tc} - B_{jc})$. The factor splits into $k_t \circ e^{B_t}$ and $k_j \circ e^{-B_j}$,
# which are plain products of matrices as long as $e^{-B}$ fits into a number: so chunks are short, and without a lower
# bound they may have to be cut further. The corrections $u$ of a chunk solve a triangular system, as on the page
# `gated_deltanet`:
#
# $$ u_t = \beta_t \left(v_t - S_0^\top (k_t \circ e^{B_t}) - \sum_{j < t} (k_t \circ e^{B_t}) \cdot (k_j \circ
#    e^{-B_j})\, u_j \right) $$
#
# This is the form for training. A decay by channel costs next to nothing in it, because it stands in queries and keys.


def chunked(q, k, v, beta, log_alpha, S, size=16):
    """The same function of the same tensors."""
    outputs = []
    for tokens in zip(*(x.split(size, 2) for x in (q, k, v, beta, log_alpha))):
        q, k, v, beta, logs = tokens
        B, beta = logs.cumsum(2), beta[..., None]
        query, key, written = q * B.exp(), k * B.exp(), (k * (-B).exp()).transpose(-2, -1)
        system = torch.eye(k.shape[2]) + (beta * key @ written).tril(-1)
        u = torch.linalg.solve_triangular(system, beta * (v - key @ S), upper=False)
        outputs.append((query @ written).tril() @ u + query @ S)
        last = B[:, :, -1:]
        S = last.transpose(-2, -1).exp() * S + (k * (last - B).exp()).transpose(-2, -1) @ u
    return torch.cat(outputs, 2), S


# ## The layer
#
# Around the rule stand a convolution over four tokens, keys and queries of length 1 (so that the state cannot grow), a
# norm of every head in the place of a denominator, and a gate of low rank with a sigmoid. The state is S and the last
# three tokens before the convolution.


class KimiDeltaAttention(nn.Module):
    def __init__(self, dim, num_heads, gate_rank, lower_bound=None):
        super().__init__()
        self.num_heads, self.d = num_heads, dim // num_heads
        self.qkvb = nn.Linear(dim, 3 * dim + num_heads, bias=False)
        # the row convolution[b] weighs the token b places back
        self.convolution = nn.Parameter(torch.empty(4, num_heads, 3 * self.d).uniform_(-0.5, 0.5))
        self.decay, self.norm = Decay(dim, num_heads, self.d, lower_bound), nn.Parameter(torch.ones(self.d))
        self.gate_down, self.gate_up = nn.Linear(dim, gate_rank, bias=False), nn.Linear(gate_rank, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def step(self, x, state=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        shape, time = (len(x), self.num_heads), x.shape[1]
        S, recent = state or (x.new_zeros(*shape, self.d, self.d), x.new_zeros(*shape, 3, 3 * self.d))
        heads = self.qkvb(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        tokens, beta = torch.cat([recent, heads[..., :-1]], 2), heads[..., -1].sigmoid()
        mixed = sum(self.convolution[b][:, None] * tokens[:, :, 3 - b :][:, :, :time] for b in range(4))
        q, k, v = F.silu(mixed).split(self.d, -1)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        y, S = form(q / math.sqrt(self.d), k, v, beta, self.decay(x), S)
        y = F.rms_norm(y, (self.d,), self.norm, eps=1e-6).transpose(1, 2).flatten(2)
        return self.out(y * self.gate_up(self.gate_down(x)).sigmoid()), (S, tokens[:, :, -3:])

    def forward(self, x):
        return self.step(x, form=chunked)[0]


# ## Costs, and when to take it
#
# A head of 128 stores 16,384 numbers and 1,152 for the convolution, as softmax attention after 69 tokens. One more
# token reads and writes them once, at any length. Causality holds: every part reads tokens up to $t$ only. With equal
# decays of all channels of a head it is Gated DeltaNet, with $\beta = 0$ a memory that only fades. It reaches softmax
# attention in no limit, so models keep every fourth layer for exact recall.
#
# The paper claims quality above full attention at 48 billion parameters (3 billion active), with 75 % less cache and
# decoding up to 6 times as fast at a million tokens. Our result page "delta_rules" measures 1.05 times the time of
# Gated DeltaNet, forward and backward of 4,096 tokens; "modern_lengths" measures 0.16 of softmax attention's time at
# 32,768 tokens. "mqar_16" measures 99 % of 16 pairs recalled after 1,000 steps; on text, in a minute and a half of one
# thread, KDA ends at 2.095 bits per byte and Gated DeltaNet at 2.084 ("causal_members"), with spreads of 0.011 and
# 0.015.
#
# Take it where one head has to hold short and long memories. At small sizes Gated DeltaNet is simpler and as good.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.qkv": "qkvb",
        "inner.convolution.weight": "convolution",
        "inner.decay.down": "decay.down",
        "inner.decay.up": "decay.up",
        "inner.decay.step": "decay.b",
        "inner.decay.log_rate": "decay.log_A",
        "inner.norm.weight": "norm",
        "inner.gate.down": "gate_down",
        "inner.gate.up": "gate_up",
        "inner.out": "out",
    }
    for lower_bound in (None, -5.0):
        print(f"lower bound {lower_bound}")
        page = KimiDeltaAttention(32, 4, 8, lower_bound)
        settings = {"gate_rank": 8, "decay.lower_bound": lower_bound}
        library = kinformer.layer("kda", 32, num_heads=4, set=settings)
        proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)


def train():
    return proofs.train(lambda: KimiDeltaAttention(64, 4, 16, lower_bound=-5.0), __file__)


def draw(figure, model):
    """Half-lives of the channels of each head in a trained layer, over a text."""
    text = b"in one head, some channels forget at once, and some keep a name for long"
    x = model.norms[0](model.embed(torch.tensor(list(text))[None]))
    half_lives = (math.log(0.5) / model.layers[0].decay(x)[0].detach()).log10()
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    order = half_lives.median(1).values.argsort(1)
    rows = torch.cat([head[:, index].T for head, index in zip(half_lives, order)])
    image = left.imshow(rows, aspect="auto", vmin=-0.5, vmax=2.5)
    left.set(title="half-lives of channels", xlabel="token", yticks=range(8, 64, 16))
    left.set_yticklabels([f"head {head}" for head in range(4)])
    for border in (15.5, 31.5, 47.5):
        left.axhline(border, color="white", linewidth=1)
    figure.colorbar(image, ax=left, label="log10 of tokens")
    for head, values in enumerate(half_lives):
        right.plot(values.median(0).values.sort().values, label=f"head {head}")
    right.set(title="median", xlabel="channel, sorted", ylim=(-0.5, 2.5))
    right.legend(fontsize="x-small", loc="upper left")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
