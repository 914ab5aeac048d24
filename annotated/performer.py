# # Performer: softmax attention by random features
#
# *Paper: Choromanski, Likhosherstov, Dohan, Song, Gane, Sarlos, Hawkins, Davis, Mohiuddin, Kaiser, Belanger, Colwell,
# Weller: Rethinking Attention with Performers (2021), arXiv 2009.14794. Members: `performer`. Measured: approximation,
# mqar, kernel_attention.*
#
# **Problem.** Linear attention costs $T$ instead of $T^2$, but its feature map is arbitrary: it is another function
# than softmax attention. A model trained with a softmax cannot be run with it.
#
# **Idea.** Choose random features whose product is the exponential on average. For $w \sim N(0, I)$
#
# $$ \exp(q \cdot k) = E_w [\exp(w \cdot q - |q|^2 / 2)\, \exp(w \cdot k - |k|^2 / 2)] $$
#
# because $w \cdot (q + k)$ is normally distributed with the variance $|q + k|^2$ and $|q + k|^2 = |q|^2 + |k|^2 + 2\,q
# \cdot k$. Draw $m$ vectors $w$, and attention is linear attention over $m$ features, close to softmax attention
# (FAVOR+).

import math

import torch
from torch import nn

# ## The features
#
# `positive` is the identity above (lemma 1). The $1 / \sqrt{d}$ of softmax attention becomes a factor $d^{-1/4}$ of
# queries and of keys. Features must be positive: `trigonometric` is an older unbiased estimator (equation 8), but its
# sum can be near 0 or negative where weights are small, and then the quotient explodes.
#
# The factor $\exp(-|x|^2 / 2)$ is 0 in float32 for vectors longer than 15. So features are given relative to the
# largest feature of the token, and the logarithm $b$ of the missing factor beside them. Every feature also gets a small
# share `eps` of the largest, so that no product vanishes. The authors' code takes the largest over all keys of the
# sequence, later ones included; with their code a large key in the future changes earlier outputs.


def positive(x, w, eps):
    """x [..., time, head_dim], w [m, head_dim] -> features [..., time, m], and logarithms of their factors b [...,
    time]: phi = exp(b) * features."""
    x = x / x.shape[-1] ** 0.25
    u = x @ w.T
    largest = u.amax(-1, keepdim=True)
    return ((u - largest).exp() + eps) / math.sqrt(len(w)), largest[..., 0] - x.square().sum(-1) / 2


def trigonometric(x, w, eps=None):
    """The same with sines and cosines: features [..., time, 2 m], which may be negative."""
    x = x / x.shape[-1] ** 0.25
    u = x @ w.T
    return torch.cat([u.sin(), u.cos()], -1) / math.sqrt(len(w)), x.square().sum(-1) / 2


# ## Orthogonal directions
#
# Independent directions may nearly coincide, and then they measure the same thing twice. Within groups of $d$ the rows
# of $W$ are orthogonal, each as long as a Gaussian vector. Every row keeps its distribution, so the estimate stays
# unbiased, and its variance falls (theorem 2).


def directions(m, head_dim):
    """Return w [m, head_dim]."""
    blocks = torch.randn(-(-m // head_dim), head_dim, head_dim)
    q, r = torch.linalg.qr(blocks)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # with this sign q is uniform over all rotations
    return q.mT.flatten(0, 1)[:m] * torch.randn(m, head_dim).norm(dim=-1, keepdim=True)


# ## First form: all pairs
#
# The quotient is an average of values. It cancels the factors of queries, and every factor that all keys share: so
# $\exp(b_j)$ may be divided by $\exp(c_i)$ with $c_i = \max_{j \leq i} b_j$, and then no number exceeds 1.


def parallel(q, k, b, v):
    """q, k [batch, heads, time, m] features, b [batch, heads, time] of keys, v [batch, heads, time, head_dim] -> the
    shape of v."""
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    factors = b[..., None, :] - b.cummax(-1).values[..., None]
    weights = q @ k.transpose(-2, -1) * factors.masked_fill(future, -torch.inf).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


# ## Second form: a state
#
# The state is a matrix and a vector, as in all linear attention, and the running maximum $c_t$. Key $t$ enters with
# $\exp(b_t - c_t)$, and the old state is multiplied by $\exp(c_{t-1} - c_t) \leq 1$. Only earlier keys decide $c_t$, so
# causality holds.


def recurrent(q, k, b, v, state):
    """The same function one token at a time. state: S [batch, heads, m, head_dim], z [batch, heads, m], c [batch,
    heads]."""
    S, z, c = state
    outputs = []
    for t in range(q.shape[2]):
        larger = torch.maximum(c, b[:, :, t])
        fade, key, c = (c - larger).exp()[..., None], k[:, :, t] * (b[:, :, t] - larger).exp()[..., None], larger
        S = fade[..., None] * S + key[..., :, None] * v[:, :, t, None, :]
        z = fade * z + key
        outputs.append((q[:, :, t, None] @ S)[..., 0, :] / (q[:, :, t] * z).sum(-1, keepdim=True))
    return torch.stack(outputs, 2), (S, z, c)


# ## The layer
#
# The directions are drawn once and stored with the weights. The paper draws them again from time to time in training.


class Performer(nn.Module):
    def __init__(self, dim, num_heads, features, phi=positive, eps=1e-6):
        super().__init__()
        self.num_heads, self.head_dim, self.phi, self.eps = num_heads, dim // num_heads, phi, eps
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("w", directions(features, self.head_dim))

    def project(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        return self.phi(q, self.w, self.eps)[0], *self.phi(k, self.w, self.eps), v

    def forward(self, x):
        return self.out(parallel(*self.project(x)).transpose(1, 2).flatten(2))

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, b, v = self.project(x)
        zeros = x.new_zeros(len(x), self.num_heads, q.shape[-1], self.head_dim)
        y, state = recurrent(q, k, b, v, state or (zeros, zeros[..., 0], zeros[..., 0, 0] - torch.inf))
        return self.out(y.transpose(1, 2).flatten(2)), state


# ## Costs, and when to take it
#
# A head stores $m d + m + 1$ numbers: 16,641 for $d = 64$ and $m = 256$, as softmax attention after 130 tokens. A token
# costs $m d$ products to make its features and $2 m d$ to write and read. The paper advises $m = d \ln d$. As $m$ grows
# the outputs approach softmax attention, and the error falls as $1 / \sqrt{m}$.
#
# The paper claims accuracy near a Transformer's on proteins, images and text, and compatibility with trained softmax
# weights after some more training. Our result page "approximation" measures the squared error of outputs for random
# queries and keys, in shares of the exact output squared: with entries of standard deviation 1/2 it is 0.27 with 16
# features and 0.011 with 1,024; with standard deviation 1 it is 1.8 with 1,024 features, worse than an output of zeros.
# The variance grows as $\exp(|q + k|^2)$: sharp attention, which has long queries and keys, is the hard case. "mqar"
# shows the consequence: 20 to 40 % of 8 pairs recalled after 2,000 steps, where elu + 1 has 99 %. Forward and backward
# over 4,096 tokens take 0.18 of the time of softmax attention, with elu + 1 0.12 ("kernel_attention").
#
# Take it to approximate a trained softmax model whose attention is smooth, or to study random features. When you train
# from scratch, a fixed map (`linear-transformer`) learns more in the same time.

# --- proof ---
# The library's layer with the same weights and directions gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {"inner.qkv": "qkv", "inner.out": "out", "inner.feature_map.weight": "w"}
    for features, eps in ((128, 1e-6), (12, 0.0)):
        print(f"{features} features, eps {eps}")
        page = Performer(32, 4, features, eps=eps)
        settings = {"feature_map.features": features, "feature_map.eps": eps}
        library = kinformer.layer("performer", 32, num_heads=4, set=settings)
        proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)
    k, w = torch.randn(2, 4, 30, 8), directions(16, 8)
    features = kinformer.nn.FavorFeatures(form="trigonometric", features=16).build(8).double()
    features.weight.copy_(w)
    for what, ours, theirs in zip(("features", "factors"), trigonometric(k, w), features.keys(k)):
        proofs.equal(f"trigonometric {what}", ours, theirs)


def train():
    return proofs.train(lambda: Performer(64, 4, 64), __file__)


def draw(figure, model):
    """The distance of random features from softmax attention, by their number and the length of queries and keys."""
    counts = [2**n for n in range(4, 12)]
    for axes, spread in zip(figure.subplots(1, 2, sharey=True), (0.5, 1.0)):
        q, k, v = (torch.randn(8, 1, 128, 16) * s for s in (spread, spread, 1.0))
        weights = (q @ k.transpose(-2, -1) / 4).exp().tril()
        exact = weights @ v / weights.sum(-1, keepdim=True)
        for name, phi, draw_w in (
            ("positive, orthogonal", positive, directions),
            ("positive, independent", positive, torch.randn),
            ("trigonometric, orthogonal", trigonometric, directions),
        ):
            errors = []
            for m in counts:
                w = draw_w(m, 16)
                y = parallel(phi(q, w, 1e-6)[0], *phi(k, w, 1e-6), v)
                errors.append(((y - exact).square().sum() / exact.square().sum()).item())
            axes.loglog(counts, errors, label=name)
        axes.set(title=f"entries of standard deviation {spread}", xlabel="features", ylim=(1e-4, 1e6))
        axes.axhline(1, color="gray", linewidth=0.5)
    figure.axes[0].set_ylabel("squared error (1: of zeros)")
    figure.axes[0].legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
