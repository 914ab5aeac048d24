# # DSA: an indexer that chooses tokens
#
# *Paper: DeepSeek-AI: DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models (2025), arXiv 2512.02556.
# Members: `dsa`. Measured: indexer, since_2025, latent.*
#
# **Problem.** In a long text a query gives nearly all of its weight to a few tokens. But softmax attention multiplies
# the query with every key to find them. A choice of whole blocks reads many useless tokens beside a useful one.
#
# **Idea.** Let a second, much smaller attention find the tokens, the lightning indexer. It has $H_I$ narrow heads with
# weights $w_{tj}$ made of the query's token, a ReLU in place of the softmax, and one key for each token. The real
# attention then reads the $k$ tokens of the largest scores:
#
# $$ I_{ts} = \sum_j w_{tj}\, \mathrm{relu}(q^I_{tj} \cdot k^I_s) / \sqrt{H_I d_I}, \quad C_t = \mathrm{top}_k\; I_t $$
#
# $$ y_t = \mathrm{softmax}_{s \in C_t}(q_t \cdot k_s)\, v_s $$

import math

import torch
from torch import nn

# ## The indexer
#
# The scores still cost one product for each pair of tokens, but a cheap one, and hardware may take 8-bit numbers for
# it. Only their order counts, so that the indexer needs no normalisation over keys. The mask comes before the choice:
# without it a later token could push an earlier one out of the best $k$, and the outputs would depend on the future.


def rotate(x, start, interleaved):
    """Rotary positions from start on: x [..., time, width]; a pair is 2n, 2n + 1, or n, n + width / 2."""
    half = x.shape[-1] // 2
    angles = (start + torch.arange(x.shape[-2]))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.split(half, -1)
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def index_scores(q, w, k):
    """q [batch, index_heads, time, index_dim], w [batch, time, index_heads], k [batch, slots, index_dim] -> I
    [batch, time, slots], where the last query is the last slot's token."""
    votes = (q @ k[:, None].mT).relu() / math.sqrt(q.shape[1] * q.shape[-1])
    scores = torch.einsum("bth,bhts->bts", w, votes)
    time, slots = scores.shape[1:]
    return scores.masked_fill(torch.ones(time, slots, dtype=torch.bool).triu(1 + slots - time), -torch.inf)


# ## Attention to the chosen tokens, in two forms
#
# The plain form computes all pairs and hides the others. If $k$ is at least the number of tokens, the mask is the
# causal one, and this is exact softmax attention.
#
# The layer is latent attention (page `mla`): all heads share one vector $c$ for each token, whose numbers are the key,
# and without the rotary ones the value. So one choice serves all heads.


def masked(q, c, latent_dim, scores, topk):
    """q [batch, heads, time, width], c [batch, slots, width] -> sums [batch, heads, time, latent_dim] and weights."""
    least = scores.topk(min(topk, scores.shape[-1]), -1).values[..., -1:]
    hidden = ((scores < least) | scores.isinf())[:, None]
    weights = (q @ c[:, None].mT).masked_fill(hidden, -torch.inf).softmax(-1)
    return weights @ c[:, None, :, :latent_dim], weights


# The cheap form gathers the $k$ vectors of each query. No matrix of all pairs exists beside the scores, and these can
# be computed for a few queries at a time.


def gathered(q, c, latent_dim, scores, topk):
    """The same sums; the weights [batch, heads, time, k] belong to the chosen tokens."""
    best, chosen = scores.topk(min(topk, scores.shape[-1]), -1)  # [batch, time, k]
    rows = torch.stack([tokens[index] for tokens, index in zip(c, chosen, strict=True)])  # [batch, time, k, width]
    weights = torch.einsum("bhtd,btkd->bhtk", q, rows).masked_fill(best.isinf()[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhtk,btkr->bhtr", weights, rows[..., :latent_dim]), weights


# ## How the indexer learns
#
# No gradient passes through a choice. So the indexer has a teacher: the weights of the attention, summed over its heads
# and divided by their sum. The loss is the Kullback-Leibler divergence of the teacher and the softmax of the scores:
#
# $$ L = \sum_t \mathrm{KL}(p_t \,\|\, \mathrm{softmax}(I_t)) $$
#
# At first attention stays dense, and both sides of $L$ run over all tokens: the warm-up. An untrained indexer would
# hide useful tokens from its teacher. Afterwards both run over the chosen tokens. The teacher and the inputs of the
# indexer are constants of $L$: the indexer learns from $L$ alone, and all other weights from the prediction alone.


def indexer_loss(weights, scores):
    """weights [batch, heads, time, slots] and scores [batch, time, slots] -> loss [batch]."""
    teacher = weights.detach().sum(1)
    teacher = teacher / teacher.sum(-1, keepdim=True)
    likely = scores.masked_fill(teacher == 0, -torch.inf).log_softmax(-1).masked_fill(teacher == 0, 0)
    return (torch.xlogy(teacher, teacher) - teacher * likely).sum((1, 2))


class Sparse(nn.Module):
    def __init__(self, dim, num_heads, latent_dim, rotary_dim, index_heads, index_dim, topk):
        super().__init__()
        self.head_dim, self.latent_dim, self.rotary_dim, self.topk = dim // num_heads, latent_dim, rotary_dim, topk
        self.num_heads, self.index_heads = num_heads, index_heads
        self.query = nn.Linear(dim, num_heads * (self.head_dim + rotary_dim), bias=False)
        self.down = nn.Linear(dim, latent_dim + rotary_dim, bias=False)
        self.norm = nn.RMSNorm(latent_dim, eps=1e-6)
        self.up = nn.Linear(latent_dim, num_heads * 2 * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.index_query = nn.Linear(dim, index_heads * index_dim, bias=False)
        self.index_key, self.index_norm = nn.Linear(dim, index_dim, bias=False), nn.LayerNorm(index_dim, eps=1e-6)
        self.index_weights = nn.Linear(dim, index_heads, bias=False)

    def place(self, x, start):
        half = x.shape[-1] // 2  # of the features of the indexer turn
        return torch.cat([rotate(x[..., :half], start, False), x[..., half:]], -1)

    def step(self, x, state=None, form=gathered):
        """x [batch, time, dim] behind a state -> outputs, the next state; the state is c and k^I of each token."""
        start = 0 if state is None else state[0].shape[1]
        c, k_r = self.down(x).split([self.latent_dim, self.rotary_dim], -1)
        c = torch.cat([self.norm(c), rotate(k_r, start, True)], -1)
        k_i = self.place(self.index_norm(self.index_key(x.detach())), start)
        if state is not None:
            c, k_i = torch.cat([state[0], c], 1), torch.cat([state[1], k_i], 1)
        q = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q_c, q_r = q.split([self.head_dim, self.rotary_dim], -1)
        W_uk, W_uv = self.up.weight.view(self.num_heads, 2, self.head_dim, self.latent_dim).unbind(1)
        q = torch.cat([q_c @ W_uk, rotate(q_r, start, True)], -1) / math.sqrt(self.head_dim + self.rotary_dim)
        q_i = self.index_query(x.detach()).unflatten(-1, (self.index_heads, -1)).transpose(1, 2)
        self.scores = index_scores(self.place(q_i, start), self.index_weights(x.detach()), k_i)
        sums, self.weights = form(q, c, self.latent_dim, self.scores.detach(), self.topk or k_i.shape[1])
        return self.out((sums @ W_uv.mT).transpose(1, 2).flatten(2)), (c, k_i)

    def forward(self, x):
        return self.step(x, form=masked)[0]


# ## Costs, and when to take it
#
# | DeepSeek-V3.2, one token after $t$ others | multiplications a layer | numbers read |
# | --- | ---: | ---: |
# | latent attention: 128 heads | 139,264 t | 576 t |
# | the indexer: 64 heads of 128 | 8,192 t | 128 t |
# | attention to 2,048 chosen tokens | 139,264 x 2,048 | 576 x 2,048 |
#
# The state holds 704 numbers a token: $c$ and the indexer's key. It grows, since a later query may choose any token.
# The paper trains a dense model further and reports equal quality at a lower price of long texts. Our result page
# "indexer" has small layers on a processor: after the warm-up 8 chosen tokens of 64 answer as well as all (99.7 %; with
# an untrained indexer 17 %), and after 65,536 others a token takes 5.3 milliseconds instead of 14.2 with dense
# attention and 16.9 with `rope`.
#
# Take it for texts of many thousands of tokens in which single places matter. Do not take it for short texts, where the
# indexer costs more than it saves, or where the state must not grow.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients, streamed steps and indexer's loss.


import proofs
from torch.nn import functional as F

import kinformer


def proof():
    for topk in (6, None):
        print(f"topk: {topk}")
        page = Sparse(32, 4, 16, 4, 6, 8, topk)
        settings = {"latent_dim": 16, "rotary_dim": 4, "index_heads": 6, "index_dim": 8, "topk": topk}
        library = kinformer.layer("dsa", 32, num_heads=4, **settings)
        x = torch.randn(2, 30, 32)
        alike = ("query", "down", "up", "out", "index_query", "index_key", "index_norm", "index_weights")
        names = {f"inner.{name}": name for name in (*alike, "norm")}
        proofs.compare(page, library, names, x, page.step)
        page(x)
        loss = indexer_loss(page.weights, page.scores)
        _, state = library(x, return_state=True)
        proofs.equal("the indexer's loss", loss, state.aux)
        weights = [getattr(page, name).weight for name in alike[4:]]
        theirs = [getattr(library.inner, name).weight for name in alike[4:]]
        pairs = zip(torch.autograd.grad(loss.sum(), weights), torch.autograd.grad(state.aux.sum(), theirs), strict=True)
        for name, (grad, other) in zip(alike[4:], pairs, strict=True):
            proofs.equal(f"its gradient by {name}", grad, other)


STEPS = 160


def train():
    """Half of the steps are the warm-up with dense attention, the others read 8 tokens."""
    steps = iter(range(STEPS))

    def objective(model, tokens, targets):
        if next(steps) == STEPS // 2:
            for layer in model.layers:
                layer.topk = 8
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        return (
            loss / math.log(2) + sum(indexer_loss(layer.weights, layer.scores).mean() for layer in model.layers) / 128
        )

    return proofs.train(
        lambda: Sparse(64, 4, 32, 8, 4, 16, None), __file__, steps=STEPS, positions=False, objective=objective
    )


def draw(figure, model):
    """What the indexer scores, what a query reads, and the share of dense attention's weight in a choice."""
    scored, read, share = figure.subplots(1, 3)
    text = b"the indexer chooses some of the earlier tokens, and attention reads those alone"
    with torch.no_grad():
        for layer in model.layers:
            layer.topk = None
        model(torch.tensor(list(text))[None])
        layer = model.layers[1]
        scores, weights = layer.scores[0], layer.weights[0].mean(0)
        chosen = torch.zeros_like(weights).scatter(1, scores.topk(8).indices, 1.0).tril()
        scored.imshow(scores.masked_fill(scores.isinf(), float("nan")))
        scored.set(title="scores of the indexer", xlabel="key", ylabel="query")
        shown = weights.sqrt().masked_fill(torch.ones_like(weights).triu(1).bool(), float("nan"))
        read.imshow(shown, cmap="Blues")
        rows, columns = chosen.nonzero().unbind(1)
        read.scatter(columns, rows, s=1.5, color="red", label="chosen 8")
        read.legend(fontsize="small", loc="upper right")
        read.set(title="dense weights", xlabel="key")
        late = torch.arange(40, len(text))
        sizes = [2, 4, 8, 16, 32]
        near = torch.arange(len(text)).expand_as(scores).float()
        for label, order in (("best possible", weights), ("indexer", scores), ("last tokens", near)):
            ranked = order.masked_fill(torch.ones_like(weights).triu(1).bool(), -torch.inf)
            held = [weights.gather(1, ranked.topk(size).indices)[late].sum(1).mean() for size in sizes]
            share.semilogx(sizes, held, base=2, label=label)
        share.legend(fontsize="small")
        share.set(title="share of dense weight", xlabel="tokens read", ylim=(0, 1))


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
