# # MesaNet: a regression at every token
#
# *Paper: von Oswald, Scherrer, Kobayashi, Versari, Yang, Schlegel, Maile, Schimpf, Sieberling, Meulemans, Saurous,
# Lajoie, Frenkel, Pascanu, Aguera y Arcas, Sacramento: MesaNet: Sequence Modeling by Locally Optimal Test-Time Training
# (2025), arXiv 2506.05233. Members: `mesanet`. Measured: delta_rules.*
#
# **Problem.** A layer of constant size stores values under keys in a matrix. Linear attention adds them up, so alike
# keys read each other's values. The delta rule (the page `fast_weights`) corrects one key at a time: it is one step of
# gradient descent on the squared error of the newest pair, and older pairs drift.
#
# **Idea.** Take the best matrix for all pairs so far. The error $\sum_j \gamma_j \beta_j |M k_j - v_j|^2$, with weights
# $\gamma_j$ that fade and a penalty $\lambda$ on $M$, has an exact minimum. Two sums hold all it needs:
#
# $$ H_t = \alpha_t H_{t-1} + \beta_t k_t k_t^\top, \quad S_t = \alpha_t S_{t-1} + \beta_t k_t v_t^\top $$
#
# $$ y_t = S_t^\top (H_t + \mathrm{diag}(\lambda))^{-1} q_t $$
#
# $S$ is the state of gated linear attention (the page `gla`). The new part is $H$, which knows how the keys overlap,
# and the inverse takes the overlap out. With a very large $\lambda$ it is linear attention, divided by $\lambda$.

import torch
from torch import nn
from torch.nn import functional as F

# ## First form: all matrices at once
#
# With $B_t = \log \alpha_1 + \ldots + \log \alpha_t$, token $j$ counts $\beta_j e^{B_t - B_j}$ at token $t$. The sums
# of all tokens are one product each, and a solver does the rest. Every eigenvalue of $H_t$ is at least 0, and each
# $\lambda$ is at least 1/4, so the matrix can always be inverted. This form needs a matrix for every token: it is the
# definition.


def weights(beta, log_alpha):
    """beta, log_alpha [batch, heads, time] -> the weight of token j at token t [batch, heads, time, time], and the
    weight of the state before [batch, heads, time, 1]."""
    B = log_alpha.cumsum(2)
    fade = (B[..., :, None] - B[..., None, :]).clamp(max=0).exp().tril()
    return fade * beta[..., None, :], B.exp()[..., None]


def exact(q, k, v, beta, log_alpha, ridge, H, S):
    """q, k, v [batch, heads, time, head_dim], beta, log_alpha [batch, heads, time], ridge [heads, head_dim], H and S
    [batch, heads, head_dim, head_dim] -> outputs in the shape of v, and the last H and S."""
    counts, start = weights(beta, log_alpha)
    H, S = (
        torch.einsum("bhtj,bhjc,bhjd->bhtcd", counts, k, other) + start[..., None] * before[:, :, None]
        for other, before in ((k, H), (v, S))
    )
    x = torch.linalg.solve(H + torch.diag_embed(ridge)[:, None], q)
    return torch.einsum("bhtc,bhtcd->bhtd", x, S), H[:, :, -1], S[:, :, -1]


# ## Second form: conjugate gradients
#
# A solver by conjugate gradients never forms $H_t$. It needs the products $H_t p_t$ alone, and these are linear
# attention of $k$ to $k$ with the queries $p$: quadratic within a chunk, through the state before it, for all tokens at
# once. So an iteration costs as much as a layer of linear attention, in training too. As many iterations as a head has
# channels give the exact solution. Fewer give nearly as much where keys point in few directions.
#
# Gradients need no iteration undone. $H_t$ is symmetric, so the gradient of $x = (H + \mathrm{diag}(\lambda))^{-1} q$
# is one more solve with the same matrices.


def conjugate(q, k, v, beta, log_alpha, ridge, H, S, iterations=30):
    """The same function of the same tensors, for a chunk behind the state H, S."""
    counts, start = weights(beta, log_alpha)

    def read(p, values, before):
        return (p @ k.transpose(-2, -1) * counts) @ values + start * (p @ before)

    x, r, p = torch.zeros_like(q), q, q
    for _ in range(iterations):
        product = read(p, k, H) + ridge[:, None] * p
        size = r.square().sum(-1, keepdim=True)
        step = size / (p * product).sum(-1, keepdim=True).clamp_min(1e-300)
        x, r = x + step * p, r - step * product
        p = r + r.square().sum(-1, keepdim=True) / size.clamp_min(1e-300) * p
    last = (counts[..., -1, :, None] * k).transpose(-2, -1)
    return read(x, v, S), start[:, :, -1:] * H + last @ k, start[:, :, -1:] * S + last @ v


# ## The layer
#
# $\alpha = \sigma(W_\alpha x + a)$ and $\beta = \sigma(W_\beta x + b)$ are numbers of a head. The penalty $\lambda =
# \mathrm{softplus}(\ell) + 1/4$ is learned for every channel. Queries and keys pass a convolution over four tokens and
# get length 1; values do not. The inverse sets the size of outputs, and a norm of every head follows. The state is H, S
# and the last three queries and keys. Nothing reads a later token.


class MesaNet(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.d = num_heads, dim // num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        # the row convolution[b] weighs the token b places back
        self.convolution = nn.Parameter(torch.empty(4, num_heads, 2 * self.d).uniform_(-0.5, 0.5))
        self.alpha, self.beta = nn.Linear(dim, num_heads), nn.Linear(dim, num_heads)
        self.ell, self.norm = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.ones(self.d))

    def tensors(self, x, recent):
        """x [batch, time, dim] behind the last tokens -> q, k, v, beta, log alpha, lambda, and the new last tokens."""
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        tokens = torch.cat([recent, torch.cat([q, k], -1)], 2)
        time = x.shape[1]
        mixed = sum(self.convolution[b][:, None] * tokens[:, :, 3 - b :][:, :, :time] for b in range(4))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in F.silu(mixed).chunk(2, -1))
        beta, log_alpha = self.beta(x).sigmoid().transpose(1, 2), F.logsigmoid(self.alpha(x)).transpose(1, 2)
        return (q, k, v, beta, log_alpha, F.softplus(self.ell).view(-1, self.d) + 0.25), tokens[:, :, -3:]

    def start(self, batch):
        zeros = self.norm.new_zeros(batch, self.num_heads, self.d, self.d)
        return zeros, zeros, self.norm.new_zeros(batch, self.num_heads, 3, 2 * self.d)

    def step(self, x, state=None, form=conjugate):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        H, S, recent = state or self.start(len(x))
        tensors, recent = self.tensors(x, recent)
        y, H, S = form(*tensors, H, S)
        return self.out(F.rms_norm(y, (self.d,), self.norm, eps=1e-6).transpose(1, 2).flatten(2)), (H, S, recent)

    def forward(self, x):
        return self.step(x, form=exact)[0]


# ## Costs, and when to take it
#
# A head of 64 stores 8,192 numbers in H and S and 384 for the convolution, as softmax attention after 67 tokens, at any
# length. One more token reads H once an iteration, 30 times in the authors' setting, and S once. A training step makes
# one linear attention an iteration, forward and again backward. Our result page "delta_rules" measures decayed linear
# attention, as in Mamba-2, at 0.55 times the time of Gated DeltaNet for forward and backward; MesaNet was not measured
# there. The paper claims lower perplexity than other recurrent layers at a billion parameters, most of all late in long
# texts, and more operations while generating. The layer reaches softmax attention in no limit. Take it where a state of
# constant size has to be used as well as it can be. Do not take it where time decides.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.qkv": "qkv",
        "inner.convolution.weight": "convolution",
        "inner.decay.gate": "alpha",
        "inner.rule.strength": "beta",
        "inner.rule.penalty": "ell",
        "inner.norm.weight": "norm",
        "inner.out": "out",
    }
    page, library = MesaNet(32, 4), kinformer.layer("mesanet", 32, num_heads=4)
    page.ell.data = torch.randn(32)
    proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)


def train():
    return proofs.train(lambda: MesaNet(64, 4), __file__, length=64, steps=40)


def draw(figure, model):
    """How far a trained layer's outputs are from the exact ones, by token and number of iterations."""
    text = b"a few conjugate gradients give every token what an exact solver gives"
    x = model.norms[0](model.embed(torch.tensor(list(text))[None]))
    layer = model.layers[0]
    H, S, recent = layer.start(1)
    tensors, _ = layer.tensors(x, recent)
    want = exact(*tensors, H, S)[0]
    errors = []
    for iterations in range(1, 7):
        y = conjugate(*tensors, H, S, iterations)[0]
        errors.append(((y - want).norm(dim=-1) / want.norm(dim=-1)).mean(1)[0].detach().log10())
    axes = figure.subplots()
    image = axes.imshow(torch.stack(errors), aspect="auto", vmin=-5, vmax=0)
    axes.set(ylabel="iterations", yticks=range(6), yticklabels=range(1, 7), xticks=range(len(text)))
    axes.set_xticklabels(text.decode(), fontsize="small")
    figure.colorbar(image, ax=axes, label="log10 of the relative error")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
