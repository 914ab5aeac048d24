# # Mixture of experts: many networks, two for each token
#
# *Paper: Jiang et al., Mixtral of Experts (2024), arXiv 2401.04088. Members: `mixtral`. Measured: experts,
# causal_members.*
#
# **Problem.** More weights make a better language model, but in a feed-forward network every token computes with all
# weights. Knowledge and cost grow together.
#
# **Idea.** Keep $E$ feed-forward networks, the experts, and let each token use the $n$ that a small router prefers,
# weighed by the router's softmax over those chosen:
#
# $$ y = \sum_{e \in N(x)} \frac{p_e}{\sum_{j \in N(x)} p_j}\, \mathrm{expert}_e(x), \quad
# p = \mathrm{softmax}(W_r x) $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Routing
#
# No gradient passes through the choice. The router learns through the weights of the chosen experts: if an expert
# helped, its weight grows. Dividing by the chosen sum keeps the output on one scale, however sure the router is; it
# equals a softmax over the chosen logits alone. With one expert a token, this weight is always 1 and the router learns
# nothing, so models with $n = 1$ keep $p_e$ itself.
#
# Tokens choose experts. If experts chose their tokens, or dropped tokens when they are full, the choice would depend on
# later tokens, and causality would be lost.


def route(x, W, n):
    """x [..., dim], W [experts, dim] -> p [..., experts], chosen [..., n], weights [..., n]."""
    p = (x @ W.T).softmax(-1)
    weights, chosen = p.topk(n, -1)
    return p, chosen, weights / weights.sum(-1, keepdim=True)


# ## First form: every expert computes every token
#
# An expert is a gated network, $W_2\, (\mathrm{silu}(W_1 x) \circ W_3 x)$. The clearest form computes all, and
# multiplies by 0 where an expert is not chosen.


def dense(x, chosen, weights, w1, w3, w2):
    """x [tokens, dim], w1, w3 [experts, dim, hidden], w2 [experts, hidden, dim] -> [tokens, dim]."""
    outputs = torch.einsum("eth,ehd->etd", F.silu(x @ w1) * (x @ w3), w2)
    gates = torch.zeros(len(x), len(w1)).scatter(1, chosen, weights)
    return torch.einsum("te,etd->td", gates, outputs)


# ## Second form: sorted tokens
#
# Gather the tokens of each expert, compute them in one product, and add the results where they belong. This computes
# $n$ experts a token.


def sparse(x, chosen, weights, w1, w3, w2):
    """The same function of the same tensors."""
    y = torch.zeros_like(x)
    for e in range(len(w1)):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        hidden = F.silu(x[token] @ w1[e]) * (x[token] @ w3[e])
        y = y.index_add(0, token, weights[token, slot, None] * (hidden @ w2[e]))
    return y


# ## Balance
#
# The expert with the most tokens learns the most, and attracts more tokens: soon two experts do all the work. So the
# loss gets a price (Switch Transformers, arXiv 2101.03961, equation 4). $f_e$ is the share of choices that fall on
# expert $e$, and $\bar p_e$ its mean probability:
#
# $$ L = a\, E \sum_e f_e\, \bar p_e $$
#
# $f$ is a constant that weighs the gradient of $\bar p$: the probability of a crowded expert is pushed down. With equal
# loads the sum is $1 / E$ and $L = a$. The price counts each sequence alone, so that it does not depend on the batch.


def balance(p, chosen, each=0.01):
    """p [batch, time, experts], chosen [batch, time, n] -> the price [batch], for a loss by token."""
    f = F.one_hot(chosen, p.shape[-1]).to(p).mean((1, 2))
    return each * p.shape[-1] * (f * p.mean(1)).sum(-1)


# ## The layer
#
# The experts take the place of the feed-forward network; the rest is a decoder with rotary positions, which turn the
# features $i$ and $i + d / 2$ of queries and keys by the angle position times $10000^{-2i/d}$. Only keys and values of
# attention are stored while generating, because each token is routed alone.


class Experts(nn.Module):
    def __init__(self, dim, experts, n, hidden_dim):
        super().__init__()
        self.n, self.router = n, nn.Linear(dim, experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, dim, hidden_dim) / math.sqrt(dim)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, hidden_dim, dim) / math.sqrt(hidden_dim))

    def forward(self, x, form=sparse):
        p, chosen, weights = route(x, self.router.weight, self.n)
        self.price = balance(p, chosen)
        tokens = (t.flatten(0, 1) for t in (x, chosen, weights))
        return form(*tokens, self.w1, self.w3, self.w2).view(x.shape)


def rotate(x, start):
    half = x.shape[-1] // 2
    angles = (start + torch.arange(x.shape[2]))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    def __init__(self, dim, num_heads, experts):
        super().__init__()
        self.num_heads, self.experts = num_heads, experts
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        start = 0 if state is None else state[0].shape[2]
        q, k = rotate(q, start), rotate(k, start)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + start)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(future, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# A token costs $3\, n\, \mathrm{dim} \cdot \mathrm{hidden}$ products and $E\, \mathrm{dim}$ for the router; the weights
# are $3\, E\, \mathrm{dim} \cdot \mathrm{hidden}$. Mixtral 8x7B has 47 billion weights and uses 13 billion for a token.
# With one expert, or with all experts equal, it is a decoder with one gated network.
#
# The paper claims to match Llama 2 70B with a fifth of its active weights. Our result page "experts" measures eight
# experts of width 512 with two for a token: 1.35 times the time of a network with as many operations in training, and a
# quarter of the time of one with as many weights; a single token takes 2.5 and 0.7 of their times. For a small model
# the choice does not pay: at equal parameters and in equal time `mixtral` reaches 2.155 bits per byte and `gpt` 2.071,
# in 412 and 760 steps ("causal_members").
#
# Take it where there is memory for more weights than a token may cost in operations. Do not take it for a small model.
# `pkm` is the finer alternative: a table of single values.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients, streamed steps and prices.


import proofs

import kinformer
from kinformer.core.learning import gather_aux_losses


def proof():
    names = {
        "inner.mixer_residual.norm": "norm1",
        "inner.mixer.projection.qkv": "qkv",
        "inner.mixer.out": "out",
        "inner.feed_forward_residual.norm": "norm2",
        "inner.feed_forward.router": "experts.router",
        "inner.feed_forward.gate_up": lambda weights: torch.cat([weights["experts.w1"], weights["experts.w3"]], -1),
        "inner.feed_forward.down": "experts.w2",
    }
    for experts, n in ((8, 2), (4, 1), (3, 3)):
        print(f"{n} of {experts} experts")
        page = Layer(32, 4, Experts(32, experts, n, 24))
        settings = {"num_experts": experts, "topk": n, "hidden_dim": 24}
        settings = {f"feed_forward.{name}": value for name, value in settings.items()}
        library = kinformer.layer("mixtral", 32, num_heads=4, whole=True, set=settings)
        x = torch.randn(2, 30, 32)
        proofs.compare(page, library, names, x, page.step)
        proofs.equal("all experts", page.experts(x, dense), page.experts(x))
        page(x)
        with gather_aux_losses([library.inner.feed_forward.balance]) as costs:
            library(x)
        proofs.equal("price, a sum over tokens there", 30 * page.experts.price, costs["balance"])


class Block(Layer):
    """The layer without its shortcut, which the shared model of training has."""

    def forward(self, x):
        return super().forward(x) - x


def train():
    return proofs.train(lambda: Block(64, 4, Experts(64, 8, 2, 64)), __file__)


@torch.no_grad()
def draw(figure, model):
    """The experts that a trained layer chooses for each byte of a text, and their weights."""
    text = b"def route(x, W, n): the router prefers two experts for each byte"
    tokens, seen = torch.tensor(list(text))[None], []
    for layer in model.layers:
        layer.norm2.register_forward_hook(lambda _, inputs, x: seen.append(x[0]))
    model(tokens)
    for i, (axes, x) in enumerate(zip(figure.subplots(2, 1, sharex=True), seen)):
        p, chosen, weights = route(x, model.layers[i].experts.router.weight, 2)
        axes.imshow(torch.zeros_like(p).scatter(1, chosen, weights).T, aspect="auto", cmap="Blues", vmin=0, vmax=1)
        axes.set(ylabel="expert", title=f"layer {i}", xticks=range(len(text)), xticklabels=text.decode())


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
