# # Star-Transformer: a ring of tokens, and a relay in the middle
#
# *Paper: Guo, Qiu, Liu, Shao, Xue, Zhang: Star-Transformer (2019), arXiv 1902.09113. Members: `star`. Measured:
# encoder_costs.*
#
# **Problem.** Full attention compares all $T^2$ pairs, and has to learn from data that neighbours in a text belong
# together. On small data it learns this badly.
#
# **Idea.** Connect every token to its two neighbours, and to a relay node $s$, which sees all. Neighbours are known to
# matter, and any two tokens are two steps apart, through the relay. A text has $3 T$ connections instead of $T^2$. With
# $e_i$ the input of token $i$ and $z_i$ the normalised state:
#
# $$ h_i \leftarrow \mathrm{Attention}(z_i, [z_{i-1}; z_i; z_{i+1}; e_i; s]) $$
#
# $$ s \leftarrow \mathrm{Attention}(s, [s; h_1; \ldots; h_T]) $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Attention over a few keys
#
# Both updates are multi-head softmax attention. The first argument asks, and the second is the list that it reads. The
# weights of the ring and of the relay differ. The softmax is over five keys for a token, so that no weight is small,
# and over $T + 1$ keys for the relay.


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, seen):
        """x [batch, n, dim] reads seen [batch, n, keys, dim] -> the shape of x."""
        q, k, v = (
            part(tensor).unflatten(-1, (self.num_heads, -1))
            for part, tensor in ((self.query, x), (self.key, seen), (self.value, seen))
        )
        weights = (torch.einsum("bnhd,bnkhd->bnhk", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out(torch.einsum("bnhk,bnkhd->bnhd", weights, v).flatten(2))


# ## One update
#
# First all tokens at once, then the relay, which reads the new tokens.
#
# A token reads its input $e_i$ again in each update. Without a residual the word would be lost otherwise. The norm acts
# on the states of tokens alone, before the ring: without a residual nothing else holds their scale, while $e$ and $s$
# enter without a norm. The activation is a leaky ReLU, $\max(x, x / 100)$.
#
# The ring is closed: the first and the last token are neighbours. (In the authors' code a key and a value of 0 stand
# beyond both ends.)


class Update(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.ring, self.relay = Attention(dim, num_heads), Attention(dim, num_heads)

    def forward(self, h, e, s):
        """h, e [batch, time, dim], s [batch, 1, dim] -> the next h and s."""
        z = self.norm(h)
        seen = torch.stack([z.roll(1, 1), z, z.roll(-1, 1), e, s.expand_as(z)], 2)
        h = F.leaky_relu(self.ring(z, seen))
        s = F.leaky_relu(self.relay(s, torch.cat([s, h], 1)[:, None]))
        return h, s


# ## The encoder
#
# The relay begins as the mean of the inputs. After $n$ updates a token knows its neighbours up to distance $n$
# directly, and all tokens through the relay, which holds `dim` numbers for the whole text. The updates share their
# weights (`tied`) or have separate ones. The output of a token is its mean with the relay.
#
# The relay reads all tokens, and all tokens read the relay, so the encoder is bidirectional. Two connections would
# break causality: the right neighbour, and the relay. A causal form would need one relay for each prefix, which is
# plain attention again. So nothing is generated with it and no state is stored: every new token changes all outputs.


class Star(nn.Module):
    def __init__(self, dim, num_heads, iterations=2, tied=False):
        super().__init__()
        self.iterations = iterations
        self.updates = nn.ModuleList([Update(dim, num_heads) for _ in range(1 if tied else iterations)])

    def forward(self, x):
        """x [batch, time, dim] -> the same shape."""
        h, s = x, x.mean(1, keepdim=True)
        for n in range(self.iterations):
            h, s = self.updates[n % len(self.updates)](h, x, s)
        return (h + s) / 2


# ## Costs, and when to take it
#
# A token costs five scores for itself and one for the relay in each update, at every length; the products of queries,
# keys and values cost the most: 8 products of width by width for a token and update (a layer of full attention has 4),
# because the input and the relay's update need further keys and values. (This page projects every neighbour again.)
# With $T = 3$ each token sees all tokens, beside its input and the relay, and this is softmax attention with two
# further keys. For longer texts nothing makes it exact.
#
# The paper claims better results than a Transformer on small and medium data (SNLI: 86.0 % of accuracy) and less time
# for long texts. Our result page "encoder_costs" bears out that time is linear: it grows as length$^{0.83}$ from 512 to
# 4,096 tokens (full attention: 1.37). At 4,096 tokens a training step takes 0.55 of the time of full attention; up to
# 1,024 tokens it is slower, 1.7 and 1.3 times. Quality is not measured there.
#
# Take it for texts of short to medium length and small data, when a light model is enough. Do not take it when two far
# tokens must meet directly, as in copying or recall: `dim` numbers of one relay carry everything between them.

# --- proof ---
# The library's layer with the same weights gives the same outputs and gradients.


import proofs

import kinformer


def proof():
    for iterations, tied in ((2, True), (3, False)):
        print(f"{iterations} updates, {'tied' if tied else 'separate'}")
        page = Star(32, 4, iterations, tied)
        library = kinformer.layer("star", 32, num_heads=4, iterations=iterations, tied=tied)
        names = {f"inner.{name}": name for name in page.state_dict()}
        proofs.compare(page, library, names, torch.randn(2, 30, 32))


def train():
    return proofs.train(lambda: Star(64, 4), __file__, causal=False)


@torch.no_grad()
def draw(figure, model):
    """The connections, and how far a change of one token reaches by the ring and by the relay."""
    graph, reach = figure.subplots(1, 2, width_ratios=[1, 1.6])
    angle = torch.linspace(0, 2 * math.pi, 13)
    for a, b in zip(angle, angle[1:]):
        graph.plot([a.cos(), b.cos()], [a.sin(), b.sin()], color="tab:blue")
        graph.plot([a.cos(), 0], [a.sin(), 0], color="tab:orange")
    graph.plot(angle.cos(), angle.sin(), "o", color="tab:blue", label="tokens")
    graph.plot(0, 0, "s", color="tab:orange", markersize=10, label="relay")
    graph.set(title="ring and relay", aspect="equal", xticks=[], yticks=[], xlim=(-1.2, 1.2), ylim=(-1.2, 1.8))
    graph.legend(fontsize="small", ncols=2, loc="upper center")
    x = model.norms[0](model.embed(torch.tensor(list(b"any two tokens are two steps apart, by a relay"))[None]))
    changed = x.clone()
    changed[:, 20] += 1
    star = model.layers[0]
    h, s, h2, s2 = x, x.mean(1, keepdim=True), changed, changed.mean(1, keepdim=True)
    for n, update in enumerate(star.updates):
        (h, s), (h2, s2) = update(h, x, s), update(h2, changed, s2)
        reach.semilogy((h2 - h).norm(dim=-1)[0], "o-", markersize=3, label=f"update {n + 1}")
    reach.set(title="change of each token when token 20 changes", xlabel="token", ylabel="length of the change")
    reach.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
