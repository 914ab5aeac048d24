# # CALM: leave when the prediction is confident, with a calibrated threshold
#
# *Paper: Schuster, Fisch, Gupta, Dehghani, Bahri, Tran, Tay, Metzler: Confident Adaptive Language Modeling (2022),
# arXiv 2207.07061. Members: `calm`. Measured: calm.*
#
# **Problem.** A model with exits at every layer is faster if tokens leave early, but how early is safe? A threshold
# chosen by eye is a guess.
#
# **Idea.** Measure the confidence $c$ of a token at each layer, let it leave when $c \ge \lambda$, and choose $\lambda$
# by a statistical test, so that the risk $R$ (how much worse the output is than with all layers) is at most $\delta$
# with a probability of at least $1 - \epsilon$:
#
# $$ P(R(\lambda) \le \delta) \ge 1 - \epsilon $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Distances instead of positions
#
# The layers are T5's: attention adds a learned bias for the distance of query and key to their score. Distances below
# 16 have a bias each; longer ones share buckets that widen, and all above 128 share one. All layers share the table.


def buckets(distance, count=32, longest=128):
    """distance [...] of 0 or more -> buckets [...] below `count`."""
    exact = count // 2
    far = exact + (distance.clamp(min=1) / exact).log() / math.log(longest / exact) * (count - exact)
    return torch.where(distance < exact, distance, far.long().clamp(max=count - 1))


# ## The layer
#
# The norm stands before each sublayer, so the vectors between layers are not normalised. So every exit applies the last
# norm before the shared head: early vectors are shorter, and would give flat probabilities.


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, table, cache=None):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        distance = torch.arange(k.shape[2])[-q.shape[2] :, None] - torch.arange(k.shape[2])
        bias = table[buckets(distance.clamp(min=0))].permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
        y = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


# ## Confidence
#
# `softmax`: the difference of the two highest probabilities. It costs a head at every layer. `saturation`: the cosine
# of a token's vectors at this layer and at the layer before; near 1 the layers have ceased to change it. The third, not
# shown, is a learned classifier $\sigma(w \cdot h + b)$. The last two cost a dot product.


def confidence(measure, logits, x, before):
    if measure == "saturation":
        return F.cosine_similarity(x, before, dim=-1)
    first, second = logits.softmax(-1).topk(2).values.unbind(-1)
    return first - second


# ## Leaving
#
# A token that leaves copies its vector upwards: every later layer makes its key and its value of it, because later
# tokens may reach that layer and look for it there. The state is the cache of all layers, as without exits.
#
# The confidence of a token depends on its past alone, so the model is causal. If all tokens of a text left together, by
# the least sure, later tokens would decide about earlier ones.
#
# An early mistake harms all later tokens. So the threshold falls with the position $t$ (equation 5 of the paper):
# $\lambda_t = 0.9 \lambda + 0.1 \exp(-t / s)$, with $s$ a quarter of the length.


class Calm(nn.Module):
    def __init__(self, dim, num_heads, depth, vocab=256, measure="softmax", threshold=1.1, decay=None):
        super().__init__()
        self.measure, self.threshold, self.decay = measure, threshold, decay
        self.embed, self.norm = nn.Embedding(vocab, dim), nn.LayerNorm(dim)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.table = nn.Parameter(torch.randn(32, num_heads) / 10)
        self.layers = nn.ModuleList([Layer(dim, num_heads) for _ in range(depth)])

    def head(self, x):
        return self.norm(x) @ self.embed.weight.T

    def step(self, tokens, state=None):
        """tokens [batch, time] -> logits, and the next state: a cache for each layer, and the exits of these tokens."""
        caches = state[0] if state else [None] * len(self.layers)
        place = torch.arange(tokens.shape[1]) + (caches[0][0].shape[2] if state else 0)
        falling = 0.1 * (-place / self.decay).exp() if self.decay else 0.1 * self.threshold
        level = 0.9 * self.threshold + falling
        x, exits, after = self.embed(tokens), torch.full_like(tokens, len(self.layers) - 1), []
        for n, layer in enumerate(self.layers):
            y, cache = layer(x, self.table, caches[n])
            y = torch.where((exits >= n)[..., None], y, x)
            leaves = (exits >= n) & (confidence(self.measure, self.head(y), y, x) >= level)
            x, exits = y, torch.where(leaves, exits.clamp(max=n), exits)
            after.append(cache)
        return self.head(x), (after, exits)

    def forward(self, tokens):
        return self.step(tokens)[0]


# ## Training, and the calibrated threshold
#
# All exits predict in training, and later exits weigh more, $L = \sum_n n L^n / \sum_n n$. Then the thresholds are
# tested from careful to bold on texts that the model has not seen. With a mean loss $\hat{R}$ of $m$ texts, Hoeffding's
# inequality bounds the chance of so small a loss at a risk above $\delta$ (Learn then Test, 2021):
#
# $$ p = \exp(-2 m \max(0, \delta - \hat{R})^2) $$
#
# The test ends at the first threshold with $p > \epsilon$, and the threshold before is chosen. As the order is fixed
# beforehand, each test may use all of $\epsilon$. Texts are independent draws, and losses lie in [0, 1].


def calibrate(thresholds, risk, texts, delta, epsilon):
    """thresholds in falling order; risk(threshold) is the mean loss of the texts -> the boldest safe one, or None."""
    chosen = None
    for threshold in thresholds:
        if math.exp(-2 * texts * max(0, delta - risk(threshold)) ** 2) > epsilon:
            break
        chosen = threshold
    return chosen


# ## Costs, and when to take it
#
# A token that leaves at layer $n$ of $N$ costs $n$ layers and $n$ measures, and a key and a value in each later layer.
# With a threshold above 1 no token leaves, and the model is exact softmax attention in all layers.
#
# The paper claims up to 3 times the speed of generation at a guaranteed risk. On our result page "calm" (8 layers,
# bytes, risk 5 %) the risk "as many right bytes as with all layers" is met by a threshold of 0: 2.9 times the speed,
# but 2.53 instead of 1.98 bits per byte, and the bound on unseen text, 5.04 %, is just above the risk. The risk "the
# same text as with all layers" chooses 0.9986: 7.7 of 8 layers, and 0.81 of the speed, as the measures cost more than
# they save.
#
# Take it when layers are expensive beside the head and you can name an acceptable risk, and not for a small model.

# --- proof ---
# The library's whole model with the same weights gives the same logits, gradients, streamed steps and thresholds.


import proofs

import kinformer
from kinformer.lab.calibration import risk


def proof():
    names = {"input.embedding": "embed", "norm": "norm", "stack.shared.0.table": "table"}
    parts = {"mixer.projection.qkv": "qkv", "mixer.out": "out", "feed_forward.up": "up", "feed_forward.down": "down"}
    parts |= {"mixer_residual.norm": "norm1", "feed_forward_residual.norm": "norm2"}
    names |= {f"stack.layers.{n}.{there}": f"layers.{n}.{here}" for n in range(3) for there, here in parts.items()}
    names = {f"inner.{there}": here for there, here in names.items()}
    tokens = torch.randint(256, (2, 150))
    kinds = {"softmax": "softmax_response", "saturation": "saturation"}
    for measure, threshold, decay in (("softmax", 0.7, 40.0), ("saturation", 0.85, None), ("softmax", 1.1, None)):
        page = Calm(32, 2, 3, measure=measure, threshold=threshold, decay=decay)
        nn.init.normal_(page.embed.weight, std=0.4)
        rule = {"kind": kinds[measure], "decay_tokens": decay, "thresholds": [threshold]}
        model = kinformer.build("calm", recipe="tiny", set={"stack.rule": rule}).eval()
        exits = page.step(tokens)[1][1]
        print(f"{measure} {threshold}: {[int((exits == n).sum()) for n in range(3)]} tokens leave by the exits")
        proofs.compare(page, proofs.Whole(model), names, tokens, page.step)
    thresholds = risk.grid(50)
    tested = risk.fixed_sequence(thresholds, lambda t: 0.04 * (1 - t), 2000, 0.05, 0.05, "hoeffding")
    assert risk.chosen(tested, 0.05).threshold == calibrate(thresholds, lambda t: 0.04 * (1 - t), 2000, 0.05, 0.05)


def loss(model, tokens, targets):
    """The weighted loss of all exits."""
    x, losses = model.embed(tokens), []
    for n, layer in enumerate(model.layers):
        x = layer(x, model.table)[0]
        losses.append((n + 1) * F.cross_entropy(model.head(x).mT, targets))
    return sum(losses) / sum(range(1, len(losses) + 1))


def train():
    return proofs.train(None, __file__, whole=lambda: Calm(48, 4, 4), length=64, steps=200, objective=loss)


@torch.no_grad()
def draw(figure, model):
    """The confidence of each byte at each layer, and the test of falling thresholds on texts of the page."""
    text = "the threshold falls with the position"
    tokens, rows = torch.tensor(list(text.encode()))[None], []
    confidences, tests = figure.subplots(1, 2, width_ratios=[2, 1])
    x = model.embed(tokens)
    for layer in model.layers:
        y = layer(x, model.table)[0]
        rows.append(confidence("softmax", model.head(y), y, x)[0])
        x = y
    picture = confidences.imshow(torch.stack(rows), aspect="auto", vmin=0)
    confidences.set(title="confidence of each byte", ylabel="layer", xticks=range(len(text)), xticklabels=list(text))
    confidences.set(yticks=range(len(rows)), yticklabels=range(1, len(rows) + 1))
    confidences.tick_params("x", length=0, labelsize="small")
    figure.colorbar(picture, ax=confidences)
    with open(__file__, "rb") as file:
        page = torch.tensor(list(file.read()))
    texts = page[: len(page) // 33 * 33].view(-1, 33)

    def right():
        return (model(texts[:, :-1]).argmax(-1) == texts[:, 1:]).double().mean(1)

    thresholds, full, p, layers = torch.linspace(0.95, 0, 20).tolist(), right(), [], []
    for model.threshold in thresholds:
        risk = (full - right()).clamp(min=0).mean().item()
        p.append(math.exp(-2 * len(texts) * max(0, 0.07 - risk) ** 2))
        layers.append(model.step(texts[:, :-1])[1][1].double().mean().item() + 1)
    tests.plot(layers, p, "o-", markersize=3)
    tests.axhline(0.05, color="gray", linestyle=":")
    tests.set(title="p for a risk of 7 %", xlabel="layers per token", ylabel="p")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
