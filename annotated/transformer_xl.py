# # Transformer-XL: a memory of the segment before
#
# *Paper: Dai, Yang, Yang, Carbonell, Le, Salakhutdinov: Transformer-XL: Attentive Language Models Beyond a Fixed-Length
# Context (2019), arXiv 1901.02860. Members: `transformer-xl`. Measured: xl_evaluation, memory_quality, causal_members.*
#
# **Problem.** A Transformer is trained on segments of a long text. Each segment is read alone: its first tokens have no
# context, and no gradient teaches the model to use an earlier one. Generation past the trained length must move a
# window and recompute it for every token.
#
# **Idea.** Keep the inputs $h$ of a layer from the segment before, without a gradient, and let the next segment attend
# to them. Positions must then be distances, because the same token stands at one place in its own segment and at
# another in the memory:
#
# $$ k_j, v_j = W\, \mathrm{sg}(h_j) \;\; \mathrm{in\ the\ memory}, \quad
# k_j, v_j = W h_j \;\; \mathrm{in\ the\ segment} $$
#
# $$ s_{ij} = \frac{(q_i + u) \cdot k_j + (q_i + w) \cdot W_R R_{i-j}}{\sqrt{d}} $$
#
# Here $\mathrm{sg}$ stops the gradient.

import math

import torch
from torch import nn

# ## Relative positions
#
# Multiply out the score of two tokens with added position vectors, $(W_q (x_i + P_i)) \cdot (W_k (x_j + P_j))$. It has
# four terms. Transformer-XL replaces $P_j$ by a sinusoid $R_{i-j}$ of the distance, with a projection $W_R$ separate
# from the keys', and the query's own position by two learned vectors: $u$ says which contents are interesting to every
# token, $w$ which distances.
#
# $R$ has the sines in its first half and the cosines in its second.


def sinusoids(distances, dim):
    """distances [n] -> R [n, dim]."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angles = distances[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


# $W_R R_{i-j}$ would be a vector for every pair. But it depends on the distance alone: compute the products of each
# query with all distances, and then pick the right product for every pair. The paper does the same by a shift of rows.


def attention(q, k, v, r, u, w):
    """q [batch, heads, time, head_dim], k and v [batch, heads, past + time, head_dim], r [heads, past + time, head_dim]
    by distance, u and w [heads, 1, head_dim] -> the shape of q."""
    past = k.shape[2] - q.shape[2]
    distance = past + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    by_distance = (q + w) @ r.transpose(-2, -1)
    position = by_distance.gather(-1, distance.clamp(min=0).expand(len(q), q.shape[1], -1, -1))
    scores = ((q + u) @ k.transpose(-2, -1) + position) / math.sqrt(q.shape[-1])
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v


# ## Segments
#
# The state is the pair (memory, segment so far), both inputs of the layer. When the segment is full, its inputs lose
# their gradient and join the memory, which keeps the newest `memory` tokens. Causality holds: the memory is older than
# the segment, and within the segment the mask hides later tokens. It would break if the memory held outputs of a model
# that reads both ways.
#
# Inputs are stored, not keys, so that keys of the memory are made by the present weights, and these weights learn from
# them. While generating, weights do not change, and keys and values may be stored instead.
#
# The two forms are this one method: with whole segments it is training, with one token at a time it is generation.
# Segments are counted from the beginning of the text, so the cut into chunks changes nothing.


class TransformerXL(nn.Module):
    def __init__(self, dim, num_heads, segment, memory):
        super().__init__()
        self.num_heads, self.segment, self.memory = num_heads, segment, memory
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.position = nn.Linear(dim, dim, bias=False)
        self.u, self.w = (nn.Parameter(0.02 * torch.randn(num_heads, dim // num_heads)) for _ in range(2))
        self.out = nn.Linear(dim, dim, bias=False)

    def attend(self, x, before):
        """x [batch, time, dim] behind the tokens before [batch, past, dim]."""
        slots = torch.cat([before, x], 1)
        q, k, v = self.qkv(slots).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        r = self.position(sinusoids(torch.arange(slots.shape[1]), x.shape[-1]))
        r = r.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        y = attention(q[:, :, before.shape[1] :], k, v, r, self.u[:, None], self.w[:, None])
        return self.out(y.transpose(1, 2).flatten(2))

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        memory, segment = state or (x[:, :0], x[:, :0])
        outputs = []
        while x.shape[1]:
            part, x = x.split([n := min(self.segment - segment.shape[1], x.shape[1]), x.shape[1] - n], 1)
            outputs.append(self.attend(part, torch.cat([memory, segment], 1)))
            segment = torch.cat([segment, part], 1)
            if segment.shape[1] == self.segment:
                kept = torch.cat([memory, segment], 1).detach()
                memory, segment = kept[:, max(0, kept.shape[1] - self.memory) :], x[:, :0]
        return torch.cat(outputs, 1), (memory, segment)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# A token costs `memory` to `memory + segment` comparisons, each with two products of width $d$, and as many slots are
# stored: at most 511 inputs of 256 numbers a layer with segments and memories of 256, at any length. Each layer reaches
# one memory farther back than the layer below, so $N$ layers reach $N$ memories, though gradients end at the segment.
#
# The softmax is the ordinary one, over memory and segment together. If the segment is at least as long as the text, the
# layer is exact softmax attention with relative positions. If the memory is, the values are exact and only the
# gradients are cut.
#
# The paper claims dependencies 450 % longer than a Transformer's, and evaluation up to 1,800 times as fast. Our
# result page "xl_evaluation" measures 0.11 ms a token with the carried memory and 45 ms where a window of 1,024 tokens
# is recomputed for every token, at 1.489 and 1.483 bits per byte. In short training the memory does not pay: in equal
# time, Transformer-XL ends at 2.639 bits per byte and the plain decoder at 2.603, which makes half as many steps again
# ("memory_quality"); over all members 2.110 and 2.071 ("causal_members").
#
# Take it where a text is read segment by segment, in order, and the reach must exceed what fits into training. Where
# the full context fits into memory, rotary positions and a plain cache (`rope`) are simpler and faster.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.projection.qkv": "qkv",
        "inner.position.projection": "position",
        "inner.position.biases.content": "u",
        "inner.position.biases.position": "w",
        "inner.out": "out",
    }
    for segment, memory in ((8, 16), (8, 5), (8, 0), (256, 256)):
        print(f"segments of {segment}, a memory of {memory}")
        page = TransformerXL(32, 4, segment, memory)
        library = kinformer.layer("transformer-xl", 32, num_heads=4, segment=segment, memory=memory)
        proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)


def train():
    return proofs.train(lambda: TransformerXL(64, 4, 32, 32), __file__)


def draw(figure, model):
    """The tokens that a layer sees, and how far a token acts through two layers: by its value and by its gradient."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))
    i, j = torch.arange(96)[:, None], torch.arange(96)
    start = i // 32 * 32
    left.imshow(torch.where(j >= start, 2, 1).masked_fill((j > i) | (j < start - 32), 0), cmap="Blues")
    left.set(title="memory, and own segment", xlabel="key", ylabel="query", xticks=(0, 32, 64), yticks=(0, 32, 64))
    text = torch.tensor(list(b"every layer sees one memory farther back than the layer below it. " * 2))[:128]
    changed = text.repeat(128, 1)
    changed[torch.arange(128), torch.arange(128)] = ord("#")
    with torch.no_grad():
        values = (model(changed)[:, -1] - model(text[None])[:, -1]).norm(dim=-1)
    x = model.embed(text[None]).detach().requires_grad_()
    model.embed.register_forward_hook(lambda *_: x)
    gradient = torch.autograd.grad(model(text[None])[0, -1].square().sum(), x)[0][0].norm(dim=-1)
    model.embed._forward_hooks.clear()
    right.semilogy(values.clamp(min=1e-6), label="change of the last output")
    right.semilogy(gradient.clamp(min=1e-6), label="gradient", linestyle="--")
    for edge in (32, 64, 96):
        right.axvline(edge - 0.5, color="gray", linewidth=0.5)
    right.set(title="two layers, segments and memories of 32", xlabel="token", ylim=(1e-5, None))
    right.legend(loc="upper left", fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
