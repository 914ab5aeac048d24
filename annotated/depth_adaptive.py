# # Depth-adaptive Transformer: a learnt exit for every token
#
# *Paper: Elbayad, Gu, Grave, Auli: Depth-Adaptive Transformer (2020), arXiv 1910.10073. Members: `depth-adaptive`.
# Measured: depth.*
#
# **Problem.** The last letters of a long word are easy to predict, its first letter is hard. A Transformer spends all
# its layers on both.
#
# **Idea.** Put a classifier behind every layer, train all of them at once, and learn a rule that tells which classifier
# is good enough for a token. The token leaves there. With $h^n$ the output of layer $n$, the chance to leave is
#
# $$ \chi^n = \sigma(w \cdot h^n + b), \quad q(n) = \chi^n \prod_{m < n} (1 - \chi^m) $$
#
# and $q(N)$ is the rest, so that $q$ is a distribution over the $N$ exits.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The layers
#
# These are the layers of the first Transformer: softmax attention to the past and a feed-forward network, each
# normalised behind its shortcut (post-norm). This norm suits exits: the output of *every* layer is normalised, so each
# classifier and the rule, which all exits share, read vectors of one scale. With pre-norm the exits need one more norm
# before them (the page `calm`).
#


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, cache=None):
        """x [batch, time, dim] behind the tokens of the cache (k, v) -> outputs of the same shape, and the cache."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = self.norm1(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.relu(self.up(x)))), (k, v)


# ## Leaving, and what later tokens read
#
# A token leaves by the first exit whose chance reaches 1/2. Later tokens may stay longer, and then they look for the
# keys and values of this token in layers that it never reached. So its vector is copied upwards: every later layer
# makes a key and a value of the vector at the exit, with its own weights.
#
# The decision reads $h^n$ of this token, which depends on its past alone. So the model is causal. One exit for a whole
# sequence, chosen from the mean of its tokens, would not be: the paper has this form too, where the mean is taken over
# the *source* of a translation, which is known before the first token.
#
# The state is a cache of keys and values for every layer, which is as large as without exits. Only work is saved.


class DepthAdaptive(nn.Module):
    def __init__(self, dim, num_heads, depth, vocab=256, threshold=0.5):
        super().__init__()
        self.dim, self.threshold = dim, threshold
        self.embed = nn.Embedding(vocab, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        self.layers = nn.ModuleList([Layer(dim, num_heads) for _ in range(depth)])
        self.heads = nn.ModuleList([nn.Linear(dim, vocab, bias=False) for _ in range(depth)])
        self.leave = nn.Linear(dim, 1)

    def begin(self, tokens, start=0):
        """Embedding and sinusoids: sines in even features, cosines in odd ones."""
        angles = torch.arange(start, start + tokens.shape[1])[:, None] / 10000 ** (
            torch.arange(0, self.dim, 2) / self.dim
        )
        return self.embed(tokens) * self.dim**0.5 + torch.stack([angles.sin(), angles.cos()], -1).flatten(1)

    def step(self, tokens, state=None):
        """tokens [batch, time] behind the tokens of the state -> logits [batch, time, vocab], and the next state: a
        cache for each layer, and the exits [batch, time] of the tokens of this call, counted from 0."""
        caches = state[0] if state else [None] * len(self.layers)
        x = self.begin(tokens, caches[0][0].shape[2] if state else 0)
        exits, after = torch.full_like(tokens, len(self.layers) - 1), []
        for n, layer in enumerate(self.layers):
            y, cache = layer(x, caches[n])
            x = torch.where((exits >= n)[..., None], y, x)
            leaves = (exits >= n) & (self.leave(x)[..., 0].sigmoid() >= self.threshold)
            exits = torch.where(leaves, exits.clamp(max=n), exits)
            after.append(cache)
        logits = torch.stack([head(x) for head in self.heads])
        return logits.gather(0, exits[None, ..., None].expand_as(logits[:1]))[0], (after, exits)

    def forward(self, tokens):
        return self.step(tokens)[0]


# ## Training: every exit, then the rule
#
# In training all tokens go through all layers, and every exit predicts (aligned training): the loss is the mean of the
# exits' losses. A token then reads earlier tokens as if they had never left, which differs from generation. The paper
# also draws exits at random in training (mixed), and finds it no better.


def everything(model, tokens):
    """Return the outputs of all layers [exits, batch, time, dim] and the logits of all exits."""
    x, outputs = model.begin(tokens), []
    for layer in model.layers:
        x = layer(x)[0]
        outputs.append(x)
    return torch.stack(outputs), torch.stack([head(x) for head, x in zip(model.heads, outputs)])


# An oracle that knows the right token names its best exit: the highest log-likelihood, less a price $\lambda$ per
# layer. The rule learns the oracle's choice by cross-entropy, and this loss trains the layers too:
#
# $$ n^* = \arg\max_n (\log p^n(\mathrm{target}) - \lambda n) $$
#
# $$ L = \frac{1}{N} \sum_n L^n - \alpha \log q(n^*) $$


def loss(model, tokens, targets, price=0.1, alpha=1.0):
    outputs, logits = everything(model, tokens)
    likelihood = logits.log_softmax(-1).gather(-1, targets[None, ..., None].expand(len(logits), -1, -1, 1))[..., 0]
    best = (likelihood.detach() - price * torch.arange(len(logits))[:, None, None]).argmax(0)
    chance = model.leave(outputs[:-1])[..., 0].sigmoid()
    stay = (1 - chance).cumprod(0)
    ones = torch.ones_like(stay[:1])
    q = torch.cat([chance, ones]) * torch.cat([ones, stay])
    return -likelihood.mean() - alpha * q.gather(0, best[None]).log().mean()


# ## Costs, and when to take it
#
# A token that leaves by exit $n$ of $N$ costs $n$ layers and $n$ dot products $w \cdot h$; each later layer still makes
# its key and its value, 2 of about 12 products of width by width. (This page computes everything and chooses; the
# library leaves out the rest.) Without the rule, or if no chance reaches the threshold, the model is a plain stack of
# exact softmax attention. The threshold moves a trained model between cost and quality.
#
# The paper claims the quality of a full decoder in translation with a quarter of its layers (IWSLT'14 German to
# English: 34.7 BLEU at 1.42 of 6 layers on average). Our result page "depth" measures text of bytes with 6 layers of
# width 128: the rule gives 2.223 bits per byte at 1.57 layers, where exit 1 for all tokens gives 2.410 and exit 2 gives
# 2.186. Above 2.5 layers per token one exit for all tokens is as good or better: 2.126 with the rule at 3.4 layers, and
# with exit 3.
#
# Take it when the first layers suffice for most tokens and a token's work is the cost that counts. Otherwise take fewer
# layers for all tokens: a rule is not needed, and a batch stays regular.

# --- proof ---
# The library's whole model with the same weights gives the same logits, exits, gradients, streamed steps and losses.


import proofs

import kinformer
from kinformer.adaptive.rules import AllExits


def proof():
    names = {"input.embedding": "embed", "stack.rule.linear": "leave", "head.output": "heads.2"}
    names |= {f"exit_heads.{n}.output": f"heads.{n}" for n in range(2)}
    parts = {"mixer.projection.qkv": "qkv", "mixer.out": "out", "feed_forward.up": "up", "feed_forward.down": "down"}
    parts |= {"mixer_residual.norm": "norm1", "feed_forward_residual.norm": "norm2"}
    names |= {f"stack.layers.{n}.{there}": f"layers.{n}.{here}" for n in range(3) for there, here in parts.items()}
    tokens, targets = torch.randint(256, (2, 2, 30))
    for threshold in (0.5, 2.0):
        page = DepthAdaptive(32, 2, 3, threshold=threshold)
        page.leave.weight.data.normal_()
        model = kinformer.build("depth-adaptive", recipe="tiny", set={"stack.rule.thresholds": [threshold]}).eval()
        exits = page.step(tokens)[1][1]
        print(f"threshold {threshold}: {[int((exits == n).sum()) for n in range(3)]} tokens leave by the exits")
        inner = {f"inner.{there}": here for there, here in names.items()}
        proofs.compare(page, proofs.Whole(model), inner, tokens, page.step)
    model.train()
    outputs, logits = everything(page, tokens)
    seen = AllExits.of(tuple(outputs), list(logits), targets, targets >= 0, torch.zeros_like(targets))
    losses = [F.cross_entropy(logit.mT, targets) for logit in logits]
    proofs.equal("loss", loss(page, tokens, targets), model.stack.aligned_loss(losses, seen, 1.0), 1e-6)


def train():
    return proofs.train(None, __file__, whole=lambda: DepthAdaptive(48, 4, 3), length=64, steps=300, objective=loss)


@torch.no_grad()
def draw(figure, model):
    """The exits of the bytes of a sentence, and cost against quality by the threshold and with one exit for all."""
    text = "a token leaves by the first good exit"
    bars, costs = figure.subplots(1, 2, width_ratios=[2, 1])
    layers = model.step(torch.tensor(list(text.encode()))[None])[1][1][0] + 1
    bars.bar(range(len(text)), layers, color=["tab:orange" if c == " " else "tab:blue" for c in text])
    bars.set(title="layers of each byte (orange: spaces)", xticks=range(len(text)), xticklabels=list(text))
    bars.set_yticks(range(1, len(model.layers) + 1))
    bars.tick_params("x", length=0, labelsize="small")
    with open(__file__, "rb") as file:
        page = torch.tensor(list(file.read()))
    rows = page[: len(page) // 65 * 65].view(-1, 65)[:64]

    def bits(logits):
        return F.cross_entropy(logits.mT, rows[:, 1:]).item() / math.log(2)

    points = []
    for model.threshold in torch.linspace(0.1, 0.95, 18).tolist():
        logits, (_, exits) = model.step(rows[:, :-1])
        points.append((exits.double().mean() + 1, bits(logits)))
    costs.plot(*zip(*points), "o-", markersize=3, label="the rule")
    fixed = [bits(logits) for logits in everything(model, rows[:, :-1])[1]]
    costs.plot(range(1, len(fixed) + 1), fixed, "s", color="gray", label="one exit for all")
    costs.set(title="cost and quality", xlabel="layers per token", ylabel="bits per byte")
    costs.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
