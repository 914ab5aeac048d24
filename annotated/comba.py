# # Comba: a delta rule with the loops closed
#
# *Paper: Hu, Pan, Du, Lan, Tang, Wen, Liang, Sun: Improving Bilinear RNNs with Closed-loop Control (2025), arXiv
# 2506.02475. Members: `comba`. Measured: delta_rules.*
#
# **Problem.** Gated DeltaNet (the page `gated_deltanet`) multiplies two factors: the state fades by $\alpha_t$, and the
# rest is corrected by $I - \beta_t k_t k_t^\top$. A token that fades the state strongly can no longer correct it, and
# the query reads the value that its own token has just written.
#
# **Idea.** Control theory calls the second factor feedback: the state is measured under a key, and the measurement goes
# back into the state. Comba measures the state before it fades, scales the feedback by a learned share $b$, and adds a
# second feedback, from the key to the query, by a learned number $d$:
#
# $$ S_t = \alpha_t S_{t-1} + k_t \left(\beta_t (v_t - b\, S_{t-1}^\top k_t)\right)^\top, \quad
#    y_t = S_t^\top q_t / \sqrt{d_k} $$
#
# where $q_t$ is the direction of $q'_t - d\, b\, k'_t$, for queries and keys $q'$ and $k'$ before they get length 1.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## A scalar plus a matrix of rank 1
#
# The state is multiplied by $\alpha_t I - \beta_t b\, k_t k_t^\top$. Along the key the eigenvalue is $\alpha_t -
# \beta_t b$, elsewhere it is $\alpha_t$. All eigenvalues lie between -1 and 1, so the state cannot grow. In Gated
# DeltaNet the eigenvalue along the key is $\alpha_t (1 - \beta_t)$, which is never negative. Here it is negative where
# a token forgets more than it keeps, so a key can turn the sign of what stands under it.
#
# The decay is the same as in Mamba-2 and Gated DeltaNet: a positive step of time, and a rate for each head.


class Decay(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.w, self.b = nn.Linear(dim, num_heads, bias=False), nn.Parameter(torch.linspace(-7.0, -2.3, num_heads))
        self.log_A = nn.Parameter(torch.linspace(1.0, 16.0, num_heads).log())

    def forward(self, x):
        """x [batch, time, dim] -> log alpha [batch, heads, time], below 0."""
        return (-self.log_A.exp() * F.softplus(self.w(x) + self.b)).transpose(1, 2)


# ## First form: a state
#
# The order matters: measure, fade, write, read. With $\alpha_t = 1$ the order does not show, and with $b = 1$ and $d =
# 0$ as well this is the delta rule (the page `fast_weights`).


def recurrent(q, k, v, beta, b, log_alpha, S):
    """q, k, v [batch, heads, time, head_dim], beta and log_alpha [batch, heads, time], b [heads, 1], S [batch, heads,
    head_dim, head_dim] -> outputs in the shape of v, and the last S."""
    outputs = []
    for t in range(q.shape[2]):
        key = k[:, :, t, :, None]
        measured = b * (S * key).sum(-2)
        S = log_alpha[:, :, t, None, None].exp() * S
        S = S + key * (beta[:, :, t, None] * (v[:, :, t] - measured))[..., None, :]
        outputs.append((q[:, :, t, None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 2), S


# ## Second form: one system of equations
#
# With $B_t = \log \alpha_1 + \ldots + \log \alpha_t$ the corrections $u$ solve a triangular system. What token $t$
# measures has faded up to the token before it, so its factor is $e^{B_{t-1} - B_j}$, where Gated DeltaNet has $e^{B_t -
# B_j}$:
#
# $$ u_t = \beta_t \left(v_t - b\, e^{B_{t-1}} S_0^\top k_t - b \sum_{j < t} e^{B_{t-1} - B_j} (k_j \cdot k_t)\, u_j
#    \right) $$
#
# Both exponents are at most 0, so no decay is too strong. The outputs are decayed linear attention to the corrections.
# In chunks of 64 tokens, with the state between, this is the form for training.


def parallel(q, k, v, beta, b, log_alpha, S):
    """The same function of the same tensors."""
    B, beta, b = log_alpha.cumsum(2), beta[..., None], b[..., None]
    before = F.pad(B[:, :, :-1], (1, 0))
    fade = (before[..., :, None] - B[..., None, :]).clamp(max=0).exp()
    system = torch.eye(k.shape[2]) + (beta * b * (k @ k.transpose(-2, -1)) * fade).tril(-1)
    read = before.exp()[..., None] * (k @ S)
    u = torch.linalg.solve_triangular(system, beta * (v - b * read), upper=False)
    fade = (B[..., :, None] - B[..., None, :]).clamp(max=0).exp()
    outputs = (q @ k.transpose(-2, -1) * fade).tril() @ u + B.exp()[..., None] * (q @ S)
    return outputs, B[..., -1:, None].exp() * S + (fade[..., -1, :, None] * k).transpose(-2, -1) @ u


# ## The layer
#
# The layer is Gated DeltaNet's: a convolution over four tokens, keys and queries of length 1, a norm of every head in
# the place of a denominator, which may be near 0 where products have either sign, and a gate, here a sigmoid. Two
# numbers for each head are new: $b$ is a sigmoid and begins at 0.73, $d$ begins at 0.02 (the authors: 1 in large
# models). The state is S and the last three tokens before the convolution. Nothing reads a later token; a convolution
# around the token would.


def unit(x, eps=1e-6):
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


class Comba(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, dim // num_heads
        self.qkvb = nn.Linear(dim, 3 * dim + num_heads, bias=False)
        # the row convolution[b] weighs the token b places back
        self.convolution = nn.Parameter(torch.empty(4, num_heads, 3 * self.d_k).uniform_(-0.5, 0.5))
        self.share, self.d = nn.Parameter(torch.ones(num_heads)), nn.Parameter(torch.full((num_heads,), 0.02))
        self.decay, self.norm = Decay(dim, num_heads), nn.Parameter(torch.ones(self.d_k))
        self.gate, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def step(self, x, state=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        shape, time = (len(x), self.num_heads), x.shape[1]
        S, recent = state or (x.new_zeros(*shape, self.d_k, self.d_k), x.new_zeros(*shape, 3, 3 * self.d_k))
        heads = self.qkvb(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        tokens, beta = torch.cat([recent, heads[..., :-1]], 2), heads[..., -1].sigmoid()
        mixed = sum(self.convolution[b][:, None] * tokens[:, :, 3 - b :][:, :, :time] for b in range(4))
        q, k, v = F.silu(mixed).split(self.d_k, -1)
        b = self.share.sigmoid()[:, None]
        q = unit(q - (self.d[:, None] * b)[..., None] * k) / math.sqrt(self.d_k)
        y, S = form(q, unit(k), v, beta, b, self.decay(x), S)
        y = F.rms_norm(y, (self.d_k,), self.norm, eps=1e-6).transpose(1, 2).flatten(2)
        return self.out(y * self.gate(x).sigmoid()), (S, tokens[:, :, -3:])

    def forward(self, x):
        return self.step(x, form=parallel)[0]


# ## Costs, and when to take it
#
# A head of 64 stores 4,096 numbers and 576 for the convolution, as softmax attention after 37 tokens; one more token
# reads and writes them once, at any length. The products of a chunk are the products of Gated DeltaNet, which takes 536
# ms for forward and backward of 8 heads and 4,096 tokens on our result page "delta_rules"; Comba was not measured
# there. The paper claims a forward pass 40 % faster than Gated DeltaNet's in Triton, and better language models at 340
# million and 1.3 billion parameters. flash-linear-attention holds the authors' code; its kernel gives the erasing key
# $b\, k$ length 1 again, so there $b$ acts on the query alone. The layer reaches softmax attention in no limit. Take it
# as a variant of Gated DeltaNet when you compare rules. Do not take it alone where everything in a long context must be
# recalled.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.qkv": "qkvb",
        "inner.convolution.weight": "convolution",
        "inner.decay.gate": "decay.w",
        "inner.decay.step": "decay.b",
        "inner.decay.log_rate": "decay.log_A",
        "inner.rule.feedback": "share",
        "inner.rule.correction": "d",
        "inner.norm.weight": "norm",
        "inner.gate": "gate",
        "inner.out": "out",
    }
    for rate in (1.0, 60.0):
        print(f"rates of decay times {rate:g}")
        page, library = Comba(32, 4), kinformer.layer("comba", 32, num_heads=4)
        page.decay.log_A.data += math.log(rate)
        page.share.data, page.d.data = torch.linspace(-1.0, 3.0, 4), torch.linspace(-0.5, 1.0, 4)
        proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)


def train():
    return proofs.train(lambda: Comba(64, 4), __file__)


def draw(figure, model):
    """The eigenvalue along the key in a trained layer, token by token, and the two feedbacks of its heads."""
    text = b"a state is measured before it fades, and may turn its sign"
    x = model.norms[0](model.embed(torch.tensor(list(text))[None]))
    layer = model.layers[0]
    alpha = layer.decay(x).exp()[0].detach()
    beta = layer.qkvb(x).unflatten(-1, (4, -1)).transpose(1, 2)[0, :, :, -1].sigmoid().detach()
    b, d = layer.share.sigmoid().detach(), layer.d.detach()
    top, bottom = figure.subplots(2, 1, height_ratios=(2, 1))
    image = top.imshow(alpha - beta * b[:, None], aspect="auto", vmin=-1, vmax=1, cmap="RdBu")
    top.set(title="eigenvalue along the key", ylabel="head", yticks=range(4), xticks=range(len(text)))
    top.set_xticklabels(text.decode())
    figure.colorbar(image, ax=top)
    for offset, values, label in ((-0.2, b, "share b of the feedback"), (0.2, d, "correction d of queries")):
        bottom.bar([head + offset for head in range(4)], values, 0.4, label=label)
    bottom.set(xlabel="head", xticks=range(4), ylim=(-0.2, 1.5))
    bottom.legend(fontsize="small", ncols=2, loc="upper left")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
