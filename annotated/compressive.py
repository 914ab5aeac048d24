# # Compressive Transformer: old memories become fewer
#
# *Paper: Rae, Potapenko, Jayakumar, Lillicrap: Compressive Transformers for Long-Range Sequence Modelling (2019), arXiv
# 1911.05507. Members: `compressive`. Measured: memory_quality, causal_members.*
#
# **Problem.** Transformer-XL remembers the inputs of each layer for a fixed number of tokens and then drops them. To
# reach twice as far costs twice the memory and twice the comparisons.
#
# **Idea.** Before a memory is dropped, compress it: a function $f_c$ turns $c$ neighbours into one vector, which joins
# a second queue, the compressed memory. A layer attends to both queues and to its segment in one softmax:
#
# $$ y = \mathrm{attention}(h,\; [\mathrm{compressed};\; \mathrm{memory};\; h]) $$
#
# $$ \mathrm{compressed} \leftarrow [\mathrm{compressed};\; f_c(\mathrm{oldest\ memories})] $$
#
# A compressed slot stands for $c$ tokens, so $n$ slots reach $c\,n$ tokens back.

import math

import torch
from torch import nn

# ## Attention over slots
#
# Scores have the relative positions of Transformer-XL (`transformer_xl.py` derives them): a sinusoid $R$ of the
# distance, projected, and two learned vectors $u$ and $w$. The distance counts slots, so a compressed slot is as wide
# as a token.


def attention(q, k, v, r, u, w):
    """q [batch, heads, time, head_dim], k and v [batch, heads, slots, head_dim], r [heads, slots, head_dim] by
    distance -> the shape of q."""
    past = k.shape[2] - q.shape[2]
    distance = past + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    by_distance = (q + w) @ r.transpose(-2, -1)
    position = by_distance.gather(-1, distance.clamp(min=0).expand(len(q), q.shape[1], -1, -1))
    scores = ((q + u) @ k.transpose(-2, -1) + position) / math.sqrt(q.shape[-1])
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v


def sinusoids(slots, dim):
    """R [slots, dim] of the distances 0 to slots - 1."""
    angles = torch.arange(slots)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([angles.sin(), angles.cos()], -1)


# ## Compression
#
# The paper tries means, the largest value of each feature, the most used memories, and convolutions. The best is a
# convolution with kernel and stride $c$: one product with $c$ neighbours side by side. With $c = 1$ and an identity
# nothing is lost, and the layer is Transformer-XL with a longer memory.


class Convolution(nn.Module):
    def __init__(self, dim, rate):
        super().__init__()
        self.rate, self.product = rate, nn.Linear(rate * dim, dim)

    def forward(self, old):
        """old [batch, n, dim] -> [batch, n / rate, dim]."""
        return self.product(old.unflatten(1, (-1, self.rate)).flatten(2))


# ## What trains the compression
#
# The loss of the next tokens would have to reach it through later segments, back through time. Instead $f_c$ has a loss
# on the spot: the attention of the finished segment $h$ to the old memories should find in the compressed ones the same
# content,
#
# $$ L = \mathrm{mean}\, |\, \mathrm{read}(h, \mathrm{old}) - \mathrm{read}(h, f_c(\mathrm{old}))\,|^2 $$
#
# The reading is by content alone, without positions. It has the layer's weights, but as constants: if they could learn
# from $L$, they would learn to make trivial memories, such as zeros. In the other direction no gradient of the task
# reaches $f_c$. An alternative with a learned inverse, $|\mathrm{old} - g(f_c(\mathrm{old}))|^2$, keeps everything,
# needed or not; the paper measures it behind.


def read(h, slots, weight, heads):
    """Plain attention of h [batch, time, dim] to slots [batch, n, dim], without a mask."""
    q = (h @ weight.T).unflatten(-1, (3, heads, -1))[:, :, 0].transpose(1, 2)
    _, k, v = (slots @ weight.T).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


# ## The layer
#
# The state is (compressed, memory, segment so far), all inputs of the layer or compressed inputs. A full segment loses
# its gradient and joins the memory; what exceeds the memory is compressed. One method serves for training and for
# generation, and the cut into chunks changes nothing. Causality holds because only finished segments are compressed; it
# would break if one compressed slot held tokens of the segment in hand.


class Compressive(nn.Module):
    def __init__(self, dim, num_heads, segment, memory, compressed, compression):
        super().__init__()
        self.num_heads, self.segment, self.memory, self.compressed = num_heads, segment, memory, compressed
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.position = nn.Linear(dim, dim, bias=False)
        self.u, self.w = (nn.Parameter(0.02 * torch.randn(num_heads, dim // num_heads)) for _ in range(2))
        self.out = nn.Linear(dim, dim, bias=False)
        self.compression = compression

    def attend(self, x, before):
        slots = torch.cat([before, x], 1)
        q, k, v = self.qkv(slots).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        r = self.position(sinusoids(slots.shape[1], x.shape[-1])).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        y = attention(q[:, :, before.shape[1] :], k, v, r, self.u[:, None], self.w[:, None])
        return self.out(y.transpose(1, 2).flatten(2))

    def finish(self, state):
        """Move a full segment into the memory, and what exceeds the memory into the compressed one."""
        compressed, memory, segment = state
        memory = torch.cat([memory, segment], 1).detach()
        old, memory = memory.split([max(0, memory.shape[1] - self.memory), min(memory.shape[1], self.memory)], 1)
        if old.shape[1]:
            new, weight = self.compression(old), self.qkv.weight.detach()
            before, after = (read(segment.detach(), slots, weight, self.num_heads) for slots in (old, new))
            self.loss = self.loss + self.segment * (before - after).square().mean((1, 2, 3))
            compressed = torch.cat([compressed, new.detach()], 1)[:, -self.compressed :]
        return compressed, memory, segment[:, :0]

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        state, outputs, self.loss = state or (x[:, :0],) * 3, [], x.new_zeros(len(x))
        while x.shape[1]:
            part, x = x.tensor_split([self.segment - state[2].shape[1]], 1)
            outputs.append(self.attend(part, torch.cat(state, 1)))
            state = *state[:2], torch.cat([state[2], part], 1)
            if state[2].shape[1] == self.segment:
                state = self.finish(state)
        return torch.cat(outputs, 1), state

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# A token compares with at most compressed + memory + segment slots, and these are stored: with 256 of each at most 767
# inputs of 256 numbers a layer, at any length. At the rate 2 they reach 1,023 tokens back; Transformer-XL would have to
# store them all. Compression adds $c\,\mathrm{dim}^2$ weights and, while training, two more readings a segment. If the
# segment is as long as the text, the layer is exact softmax attention with relative positions.
#
# The paper claims 17.1 perplexity on WikiText-103 (Transformer-XL 18.1) and 0.97 bits per character on enwik8. In our
# short training it is behind: in equal time 2.685 bits per byte, where Transformer-XL has 2.639 and the plain decoder
# 2.603 ("memory_quality", with means); in 1.5 minutes 2.198 beside 2.110 and 2.071 ("causal_members"), with a third of
# the plain decoder's steps.
#
# Take it where a long past matters roughly and the state must stay small. Do not take it for exact look-ups
# (`memorizing` keeps every key) or for short training.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients, streamed steps and losses.


import proofs

import kinformer


class Mean(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, old):
        return old.unflatten(1, (-1, self.rate)).mean(2)


def proof():
    names = {
        "inner.projection.qkv": "qkv",
        "inner.position.projection": "position",
        "inner.position.biases.content": "u",
        "inner.position.biases.position": "w",
        "inner.out": "out",
    }
    for compression, settings in (
        (Convolution(32, 2), {"compression.rate": 2}),
        (Mean(4), {"compression": {"kind": "pool", "rate": 4}}),
    ):
        print(type(compression).__name__)
        page = Compressive(32, 4, 8, 8, 5, compression)
        library = kinformer.layer("compressive", 32, num_heads=4, segment=8, memory=8, compressed=5, set=settings)
        weights = {"inner.compression.product": "compression.product"} if isinstance(compression, Convolution) else {}
        x = torch.randn(2, 45, 32)
        proofs.compare(page, library, names | weights, x, page.step)
        if weights:
            page(x)
            _, state = library(x, return_state=True)
            proofs.equal("losses of the compression", page.loss, state.aux)
            ours, theirs = page.compression.product, library.inner.compression.product
            ours = torch.autograd.grad(page.loss.sum(), ours.weight)[0]
            proofs.equal("their gradients", ours, torch.autograd.grad(state.aux.sum(), theirs.weight)[0])


def train():
    return proofs.train(lambda: Compressive(64, 4, 16, 16, 16, Convolution(64, 4)), __file__)


def draw(figure, model):
    """The slots that stand for each token of the past, and the reach of equally many slots."""
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    tokens, segment, memory, compressed, rate = 112, 16, 16, 8, 4
    picture = torch.zeros(tokens, tokens)
    for i in range(tokens):
        start = i // segment * segment
        picture[i, start : i + 1] = 3
        picture[i, max(0, start - memory) : start] = 2
        picture[i, max(0, start - memory - compressed * rate) : max(0, start - memory)] = 1
    left.imshow(picture, cmap="Blues", aspect="auto")
    left.set(title="segment, memory, compressed (light)", xlabel="token of the past", ylabel="query")
    slots = range(256, 2049, 64)
    for rate in (1, 2, 4, 8):
        reach = [256 + rate * (n - 256) for n in slots]
        right.plot(slots, reach, label="Transformer-XL" if rate == 1 else f"rate {rate}")
    right.set(title="reach of a layer", xlabel="slots, with 256 exact ones", ylabel="tokens")
    right.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
