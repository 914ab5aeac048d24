# # Adaptive span: each head learns how far it looks
#
# *Paper: Sukhbaatar, Grave, Bojanowski, Joulin: Adaptive Attention Span in Transformers (2019), arXiv 1905.07799.
# Members: `adaptive-span`. Measured: spans, dynamic_spans, causal_members.*
#
# **Problem.** Most heads of a trained Transformer look at the last few tokens, and few look far. A common window is too
# long for most and too short for some, and all pay for the longest.
#
# **Idea.** Give each head a learned span $z$. A soft mask $m$ is 1 up to the span and falls to 0 over a ramp of $R$
# tokens, so a gradient reaches $z$:
#
# $$ p_{ij} = \frac{m(i - j)\, \exp(s_{ij})}{\sum_{r < i} m(i - r)\, \exp(s_{ir})} $$
#
# $$ m(x) = \min(\max(\frac{R + z + 1 - x}{R}, 0), 1) $$
#
# The loss gets a price of the mean span, so a head looks far only if that pays.

import math

import torch
from torch import nn

# ## The soft mask
#
# The mask multiplies the exponentials, before the division: the weights that remain still sum to 1. The gradient of a
# hard window in $z$ is 0; a ramp has one, $1/R$ for each token on it. Distance 1, the token before, always has a mask
# of 1, so at $z = 0$ a head sees $R$ tokens with falling weights.
#
# Spans are kept between 0 and the longest span after each update. Not by `clamp` in the computation: its gradient at a
# bound is 0 in newer versions of PyTorch, and a span that begins at 0 could not leave it.


def mask(distance, z, ramp):
    """distance [time, keys], z [heads] in tokens -> m [heads, time, keys]."""
    m = (ramp + z[:, None, None] - (distance - 1)) / ramp
    return bound(m)


def bound(m):
    """m between 0 and 1."""
    return m.masked_fill(m < 0, 0).masked_fill(m > 1, 1)


# ## Positions
#
# A window slides, so positions are distances: one learned vector for each distance, added to the key. All heads and
# layers share the table. Its first entry is for distance 1: a token does not see itself, which its shortcut passes on
# anyway.
#
# $$ s_{ij} = q_i \cdot (k_j + e_{i-j}) / \sqrt{d}, \quad i - j = 1, 2, \ldots $$


def attention(q, k, v, table, z, ramp):
    """q [batch, heads, time, head_dim], k, v [batch, heads, past + time, head_dim], table [longest span, head_dim] ->
    the shape of q."""
    distance = k.shape[2] - q.shape[2] + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    position = (q @ table.T).gather(-1, (distance - 1).clamp(0, len(table) - 1).expand(*q.shape[:2], -1, -1))
    scores = (q @ k.transpose(-2, -1) + position) / math.sqrt(q.shape[-1])
    m = mask(distance, z, ramp) * ((distance > 0) & (distance <= len(table)))
    weights = m * (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.where(total > 0, 1)  # the first token sees nothing, and gets 0


# ## The layer
#
# The state is keys and values of the last tokens, as many as the longest span of the heads needs: $z + R$, rounded up.
# The page keeps all heads to one length; the library cuts every head at its own. The whole text and single steps give
# the same outputs. Causality holds because distances below 1 are masked; the span is one number a head, and no token
# chooses it.


class AdaptiveSpan(nn.Module):
    def __init__(self, dim, num_heads, max_span, ramp=32, table=None):
        super().__init__()
        self.num_heads, self.max_span, self.ramp = num_heads, max_span, ramp
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.table = nn.Parameter(torch.randn(max_span, dim // num_heads)) if table is None else table
        self.span = nn.Parameter(torch.zeros(num_heads))  # the share of the longest span

    def z(self):
        return self.max_span * bound(self.span)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        y = attention(q, k, v, self.table, self.z(), self.ramp)
        keep = min(self.max_span, math.ceil(self.z().max().item()) + self.ramp)
        return self.out(y.transpose(1, 2).flatten(2)), (k[:, :, -keep:], v[:, :, -keep:])

    def forward(self, x):
        return self.step(x)[0]

    def price(self, each=2e-6):
        """The price of the spans, added to the loss: a mean over heads, which the model adds up over layers."""
        return each * self.z().mean()


# ## Costs, and when to take it
#
# A head costs its span: a token compares with $z + R$ keys at most, and as many keys and values are stored. With spans
# of the longest the layer is exact softmax attention to the last `max_span` tokens, with a vector for every distance.
#
# The paper claims 0.98 bits per character on enwik8 with spans of up to 8,192 tokens, mean spans of some hundred, and
# that early layers look near while a few heads of late layers look far. Our result page "spans" measures six layers of
# four heads after 1.2 million tokens: of 1,024 possible tokens heads learn 0 to 36, the state shrinks to 7 %, a
# training step takes 0.58 of the time, and held-out text costs 2.103 bits per byte where full spans have 2.156. So
# early in training near tokens are worth most. In equal time it equals `gpt`, 2.071 ("causal_members"). Spans by token,
# a variant of the paper, take 1.3 to 2.2 times as long ("dynamic_spans").
#
# Take it where most heads need little context and you do not know which. Where spans are known in advance, `local` is
# simpler and faster.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients, streamed steps and prices.


import proofs

import kinformer


def proof():
    names = {
        "inner.projection.qkv": "qkv",
        "inner.position.table.keys": "table",
        "inner.span.span": "span",
        "inner.out": "out",
    }
    # A mask of exactly 0 has a gradient here and none in the library, so these spans leave no mask on that corner.
    for max_span, ramp, spans in ((48, 4, (0.003, 0.1, 0.23, 1.0)), (16, 32, (0.5, 0.0, 0.9, 0.2))):
        print(f"spans of up to {max_span}, a ramp of {ramp}")
        page = AdaptiveSpan(32, 4, max_span, ramp)
        with torch.no_grad():
            page.span.copy_(torch.tensor(spans))
        settings = {"position.max_distance": max_span, "span.max_span": max_span, "span.ramp": ramp}
        library = kinformer.layer("adaptive-span", 32, num_heads=4, set=settings | {"span.multiple": 1})
        proofs.copy_weights(page, library, names)
        library.inner.span.constrain()  # heads are cut off where a trainer would cut them
        proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)
        proofs.equal("price", page.price(), library.inner.span.penalty())


def train():
    model = proofs.train(lambda: AdaptiveSpan(64, 4, 128, 8), __file__)
    spans = [f"{z:.1f}" for layer in model.layers for z in layer.z().tolist()]
    print(f"spans of its heads: {', '.join(spans)}")
    return model


def learn_distances(distances, price, steps=180):
    """Let each head find the token of a random row so far back; return the spans of the heads after each step."""
    layer = AdaptiveSpan(32, len(distances), 64, 8)
    nn.init.constant_(layer.span, 0.7)
    embed = torch.randn(16, 32)
    optimizer, spans = torch.optim.Adam(layer.parameters(), lr=1e-2), []
    for _ in range(steps):
        x = embed[torch.randint(16, (8, 80))]
        q, k, _ = layer.qkv(x).unflatten(-1, (3, len(distances), -1)).permute(2, 0, 3, 1, 4)
        y = attention(q, k, x[:, None], layer.table, layer.z(), layer.ramp)[:, :, 64:]
        targets = torch.stack([x[:, 64 - d : 80 - d] for d in distances], 1)
        loss = (y - targets).square().mean() + price * layer.z().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            layer.span.clamp_(0, 1)
        spans.append(layer.z().detach())
    return torch.stack(spans)


def draw(figure, model):
    """The soft mask, and spans that shrink until the heads would lose their token."""
    left, right = figure.subplots(1, 2)
    distance = torch.arange(1, 129)
    for z in (0.0, 20.0, 60.0):
        left.plot(distance, mask(distance[None], torch.tensor([z]), 32)[0, 0], label=f"z = {z:.0f}")
    left.set(title="the mask, R = 32", xlabel="distance", ylabel="m")
    left.legend(fontsize="small")
    distances = (2, 10, 20, 35)
    for head, spans in enumerate(learn_distances(distances, 0.01).T):
        right.plot(spans, label=f"{distances[head]} tokens back", color=f"C{head}")
        right.axhline(distances[head], linestyle=":", color=f"C{head}")
    right.set(title="heads that must look back (R = 8)", xlabel="steps", ylabel="span z", ylim=(0, 55))
    right.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
