# # TTT-Linear: a state that learns by gradient descent
#
# *Paper: Sun, Li, Dalal, Xu, Vikram, Zhang, Dubois, Chen, Wang, Koyejo, Hashimoto, Guestrin: Learning to (Learn at Test
# Time): RNNs with Expressive Hidden States (2024), arXiv 2407.04620. Members: `ttt`. Measured: since_2025.*
#
# **Problem.** A recurrent layer must press a text of any length into a state of constant size, by some rule.
#
# **Idea.** Training does the same: it presses a data set of any length into weights. So let the state be the weights
# $W$ of a small model $f$, and the rule be a step of gradient descent. The model is to make the value $v$ of a token
# from its key $k$, which is a task without labels. These weights then answer the query:
#
# $$ L(W; k, v) = \frac{1}{2} |f(k; W) - v|^2, \quad W_t = W_{t-1} - \eta_t \nabla L(W_{t-1}; k_t, v_t), \quad
# y_t = f(q_t; W_t) $$
#
# Training learns the products that make $k$, $v$ and $q$, the first weights $W_0$, and the learning rate $\eta_t$ of a
# token. Its gradient passes through all steps of the inner descent.

import torch
from torch import nn
from torch.nn import functional as F

# ## The inner model
#
# $f$ is linear, with a bias, behind a layer norm and in a residual. The residual makes the difference $v - k$ the
# target. The norm bounds what $f$ adds, so a large $W$ cannot make outputs large, and the steps stay stable. The
# gradient for $z = [k, 1] W$ is taken by autograd. It stays a part of the graph, as training differentiates it again.


def with_one(x):
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def behind(x, z, weight, bias):
    """x, z [batch, heads, time, d], weight, bias [heads, 1, d] -> x + norm(z)."""
    return x + F.layer_norm(z, z.shape[-1:], eps=1e-6) * weight + bias


def gradients(k, v, W, weight, bias):
    """The gradient of every token's loss for z, [batch, heads, time, d], at the weights W [batch, heads, d + 1, d]."""
    with torch.enable_grad():
        z = (with_one(k) @ W).requires_grad_()
        loss = (behind(k, z, weight, bias) - v).square().sum() / 2
        return torch.autograd.grad(loss, z, create_graph=True)[0]


# ## Mini-batches
#
# A gradient at $W_{t-1}$ has to wait for the token before. The paper takes the gradients of 16 tokens at once, all at
# the weights $W_m$ before them. Token $t$, the $i$-th of its mini-batch, still reads the weights after its own step:
#
# $$ W_t = W_m - s_i G_t, \quad G_t = \sum_{m < j \le t} \eta_j \nabla L(W_m; k_j, v_j) $$
#
# $s_i = \max(1 / i + a_i, 0)$ makes the sum a mean, and training adjusts it by $a_i$. A single mean over all 16 tokens
# would be simpler, but its first tokens would read the values of later ones: that breaks causality.
#
# One token at a time, the state is $W_m$, $G$ and $i$. This form is the definition.


def token(q, k, v, eta, a, W, G, i, weight, bias):
    """One token: q, k, v [batch, heads, 1, d], eta [batch, heads, 1, 1] -> its output, and W, G and i behind it."""
    G = G + eta * with_one(k).transpose(-2, -1) @ gradients(k, v, W, weight, bias)
    share = (1 / (i + 1) + a[i]).clamp_min(0)
    y = behind(q, with_one(q) @ (W - share * G), weight, bias)
    return (y, W, G, i + 1) if i + 1 < len(a) else (y, W - share * G, torch.zeros_like(G), 0)


# ## The dual form
#
# A whole mini-batch does not need a matrix $W_t$ for each token. With the rows $g_j = \eta_j \, \partial L / \partial
# z_j$, $G_t$ is a sum of outer products $[k_j, 1]^\top g_j$. A query then reads
#
# $$ [q_t, 1] W_t = [q_t, 1] W_m - s_i \sum_{m < j \le t} ([q_t, 1] \cdot [k_j, 1]) \, g_j $$
#
# The sum is attention without a softmax inside the mini-batch. Mini-batches follow one after the other.


def mini_batch(q, k, v, eta, a, W, weight, bias):
    """The first tokens of a mini-batch, of the shapes above -> their outputs, and the weights after them."""
    g = eta * gradients(k, v, W, weight, bias)
    q_one, k_one = with_one(q), with_one(k)
    share = (1 / torch.arange(1, len(a) + 1) + a).clamp_min(0)[: q.shape[2], None]
    z = q_one @ W - share * (q_one @ k_one.transpose(-2, -1)).tril() @ g
    return behind(q, z, weight, bias), W - share[-1] * k_one.transpose(-2, -1) @ g


# ## The layer
#
# $\eta_t = \sigma(u \cdot x_t + c) / d$ is a number of a head. Queries and keys are turned by their place in the
# mini-batch. A norm over all heads stands before the output product.


def turn(x, place):
    """Turn the features 2i and 2i + 1 of x [batch, heads, time, d] by place * 10000^(-2i / d)."""
    angle = place[:, None] * 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)


class TTTLinear(nn.Module):
    def __init__(self, dim, num_heads, size=16):
        super().__init__()
        self.num_heads, self.size, self.d = num_heads, size, dim // num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.eta, self.a = nn.Linear(dim, num_heads), nn.Parameter(torch.zeros(size))
        self.W0 = nn.Parameter(0.02 * torch.randn(num_heads, self.d + 1, self.d))
        shape = num_heads, self.d
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def tensors(self, x, i=0):
        """x [batch, time, dim], whose first token has the place i in its mini-batch -> q, k, v, eta."""
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        place = (i + torch.arange(x.shape[1])) % self.size
        return turn(q, place), turn(k, place), v, self.eta(x).sigmoid().transpose(1, 2)[..., None] / self.d

    def inner(self):
        return self.weight[:, None], self.bias[:, None]

    def output(self, heads):
        return self.out(self.norm(torch.cat(heads, 2).transpose(1, 2).flatten(2)))

    def forward(self, x):
        W, heads = self.W0.expand(len(x), -1, -1, -1), []
        for part in zip(*(tensor.split(self.size, 2) for tensor in self.tensors(x)), strict=True):
            y, W = mini_batch(*part, self.a, W, *self.inner())
            heads.append(y)
        return self.output(heads)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state, token by token -> outputs and the next state."""
        W = self.W0.expand(len(x), -1, -1, -1)
        W, G, i = state or (W, torch.zeros_like(W), 0)
        heads = []
        for part in zip(*(tensor.split(1, 2) for tensor in self.tensors(x, i)), strict=True):
            y, W, G, i = token(*part, self.a, W, G, i, *self.inner())
            heads.append(y)
        return self.output(heads), (W, G, i)


# ## Costs, and when to take it
#
# A head of width d stores 2 d (d + 1) numbers at any length, 8,320 at 64, as softmax attention after 65 tokens. Our
# result page "since_2025" has the bytes beside other layers of recent years. One more token takes three products of a
# row with a matrix and one outer product. In training the mini-batches of a row come one after the other, so few long
# rows are slow. The paper claims that perplexity keeps falling up to 32,000 tokens of context, where Mamba stops at
# 16,000. Without the norm and with mini-batches of one token a step is the delta rule (the page `fast_weights`), for
# the target $v - k$. Without the norm, with $W_0 = 0$ and a single mini-batch it is linear attention. It reaches
# softmax attention in no limit. Take it to study other states: another $f$, loss or optimiser fits in the same place.
# Do not take it where time decides.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


from pathlib import Path

import proofs

import kinformer


def proof():
    names = {
        "inner.qkv": "qkv",
        "inner.rates": "eta",
        "inner.shares": "a",
        "inner.first": "W0",
        "inner.inner_norm.weight": "weight",
        "inner.inner_norm.bias": "bias",
        "inner.norm": "norm",
        "inner.out": "out",
    }
    page, library = TTTLinear(32, 4), kinformer.layer("ttt", 32, num_heads=4)
    for parameter in (page.a, page.W0, page.weight, page.bias):
        parameter.data += 0.3 * torch.randn_like(parameter)
    proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)


def train():
    return proofs.train(lambda: TTTLinear(64, 4), __file__, length=64, steps=40)


def draw(figure, model):
    """The inner loss of the tokens of a text at the first weights, before their mini-batch and after their step."""
    text = Path(__file__).read_bytes()[600:1112]
    x = model.norms[0](model.embed(torch.tensor(list(text))[None]))
    layer = model.layers[0]
    q, k, v, eta = layer.tensors(x)
    weight, bias = layer.inner()

    def loss(k, v, W):
        return (behind(k, with_one(k) @ W, weight, bias) - v).square().sum(-1).mean(1)[0] / 2

    W = layer.W0[None]
    losses = {"at the first weights": [], "before the mini-batch": [], "after the mini-batch": []}
    for part in zip(*(tensor.split(16, 2) for tensor in (q, k, v, eta)), strict=True):
        after = mini_batch(*part, layer.a, W, weight, bias)[1]
        for name, at in zip(losses, (layer.W0[None], W, after), strict=True):
            losses[name].append(loss(*part[1:3], at).mean().item())
        W = after
    axes = figure.subplots()
    for name, values in losses.items():
        axes.plot(range(0, len(text), 16), values, label=name)
    axes.set(xlabel="token", ylabel="inner loss, mean of a mini-batch", ylim=(0, None))
    axes.legend(frameon=False)


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
