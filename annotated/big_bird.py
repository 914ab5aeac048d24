# # Big Bird: window, global and random blocks
#
# *Paper: Zaheer et al., Big Bird: Transformers for Longer Sequences (2020), arXiv 2007.14062. Members: `big-bird`.
# Measured: encoders, listops.*
#
# **Problem.** An encoder such as BERT compares all pairs of tokens, so it reads 512 tokens at a time. A document of
# 4,096 tokens needs 64 times the comparisons. A window makes the cost linear, but far tokens are then many layers
# apart.
#
# **Idea.** See the pattern as a graph in which an edge is a comparison. A sparse graph can still have short paths: add
# to the window a few global nodes, joined to all others, and a few random edges. All edges are between whole blocks of
# $b$ tokens, which hardware multiplies quickly.
#
# $$ y_i = \sum_{j \in A(i)} p_{ij} v_j, \quad
# p_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt{d})}{\sum_{m \in A(i)} \exp(q_i \cdot k_m / \sqrt{d})}, \quad
# A(i) = \mathrm{window} \cup \mathrm{global} \cup \mathrm{random} $$

import math

import torch
from torch import nn

# ## Three sets of blocks
#
# Block $i$ sees block $i - 1$, itself and block $i + 1$. The first and the last block are global: they see every block,
# and every block sees them. And each block sees $r$ random blocks.
#
# Why each set is there: language is local, which the window covers. A path through a global block joins any two tokens
# in two steps; the paper's proofs that the sparse encoder is as expressive as the full one rest on it. In a random
# graph the paths grow with the logarithm of the number of nodes, so random edges spread information even where the few
# global tokens are full.


def draw_blocks(num_heads, blocks, random):
    """Draw for every head and block of queries `random` distinct blocks: [heads, blocks, random]."""
    return torch.rand(num_heads, blocks, blocks).topk(random, -1).indices


def adjacency(drawn):
    """drawn [heads, blocks, random] -> bool [heads, blocks, blocks]: a block of queries sees a block of keys."""
    blocks = drawn.shape[1]
    i, j = torch.arange(blocks)[:, None], torch.arange(blocks)
    window = (i - j).abs() <= 1
    both_ends = (i == 0) | (j == 0) | (i == blocks - 1) | (j == blocks - 1)
    random = (drawn[..., None] == j).any(-2)
    return window | both_ends | random


# The random blocks are drawn once, when the model is built: a pattern that changed from call to call would be noise
# that training has to fight. A block that is drawn twice, or lies in the window anyway, counts once, since $A(i)$ is a
# set.

# ## First form: a mask
#
# The softmax normalises over the set, so the weights of every token sum to 1, whether its block is global and sees all
# tokens or sees eight blocks.


def masked(q, k, v, drawn, block):
    """q, k, v [batch, heads, time, head_dim] -> the same shape."""
    time = q.shape[2]
    seen = adjacency(drawn).repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :time, :time]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


# ## Second form: gather the blocks
#
# A block of queries takes the keys of its blocks together and computes one small product. The cost follows the seen
# pairs: $T$ queries times $(5 + r)\, b$ keys at most, except in the two global blocks.


def gathered(q, k, v, drawn, block):
    """The same function; only pairs of seen blocks are computed."""
    y, seen = torch.empty_like(q), adjacency(drawn)
    keys = torch.arange(q.shape[2]).split(block)
    for head in range(q.shape[1]):
        for number, queries in enumerate(keys):
            chosen = torch.cat([keys[j] for j in seen[head, number].nonzero()[:, 0]])
            scores = q[:, head, queries] @ k[:, head, chosen].transpose(-2, -1) / math.sqrt(q.shape[-1])
            y[:, head, queries] = scores.softmax(-1) @ v[:, head, chosen]
    return y


# ## The layer
#
# Everything else is BERT's multi-head attention; every head has other random blocks. Tokens see later tokens, so the
# layer is for encoders: nothing is stored, and it generates no text. A causal version would have to drop the last block
# as a global one and all later random blocks.
#
# When the blocks of $A(i)$ cover the text, the layer is exact softmax attention. The authors' code and the library use
# full attention for texts of at most $5 + 2 r$ blocks, where nothing would be saved.


class BigBirdAttention(nn.Module):
    def __init__(self, dim, num_heads, block, blocks, random):
        super().__init__()
        self.num_heads, self.block = num_heads, block
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("drawn", draw_blocks(num_heads, blocks, random))

    def forward(self, x):
        """x [batch, time, dim] -> the same shape."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(masked(q, k, v, self.drawn, self.block).transpose(1, 2).flatten(2))


# ## Costs, and when to take it
#
# | | full attention | Big Bird, $b = 64$, $r = 3$ |
# | --- | --- | --- |
# | keys of a token | $T$ | 512 |
# | scores of 4,096 tokens | 16.8 million | 2.6 million |
# | scores of 32,768 tokens | 1,074 million | 21 million |
#
# Take it for long documents whose parts refer to each other. Do not take it below a few thousand tokens: its blocks
# cover everything then.
#
# The paper reads 4,096 tokens and reports 84.5 F1 on TriviaQA and 46.6 ROUGE-1 for summaries of arXiv papers. On our
# result page "encoders" the attention of 4,096 tokens takes 414 ms, forward and backward, where full attention takes
# 1,011 ms; memory is linear up to 32,768 tokens. On "listops" Big Bird reaches 35.9 % in four minutes and full
# attention 36.1 %, as much as the outermost operator alone reveals: that task separates no encoder from the others.

# --- proof ---
# The library's layer with the same weights and the same random blocks gives the same outputs and gradients, also where
# the last block is shorter.


import proofs

import kinformer
from kinformer.parts.patterns.blocks import random_table


def proof():
    names = {"inner.projection.qkv": "qkv", "inner.out": "out"}
    for time, block, random in ((96, 8, 3), (77, 4, 2), (80, 8, 3)):
        blocks = -(-time // block)
        print(f"{blocks} blocks of {block}, the last of {time - (blocks - 1) * block}; random blocks: {random}")
        page = BigBirdAttention(32, 4, block, blocks, random)
        pattern = {"kind": "big_bird", "block": block, "random": random, "num_heads": 4, "seed": 2}
        library = kinformer.layer("big-bird", 32, num_heads=4, pattern=pattern)
        if blocks > 5 + 2 * random:
            page.drawn = torch.tensor(random_table(blocks, block, random, 2, 4), dtype=torch.int64)
        else:
            page.drawn = torch.arange(blocks).expand(4, blocks, -1)  # full attention
        proofs.compare(page, library, names, torch.randn(2, time, 32))
        q, k, v = torch.randn(3, 2, 4, time, 8)
        drawn = page.drawn
        proofs.equal("gathered blocks", gathered(q, k, v, drawn, block), masked(q, k, v, drawn, block))


def train():
    return proofs.train(lambda: BigBirdAttention(64, 4, 8, 16, 2), __file__, causal=False)


def draw(figure, model):
    """The blocks of one head, the steps of the shortest paths without and with random blocks, and trained weights."""
    panels = figure.subplots(1, 3)
    drawn = draw_blocks(1, 32, 2)
    i, j = torch.arange(32)[:, None], torch.arange(32)
    window = (i - j).abs() <= 1
    ends = (i == 0) | (j == 0) | (i == 31) | (j == 31)
    random = adjacency(drawn)[0] & ~window & ~ends
    panels[0].imshow(window * 3.0 + (ends & ~window) * 2.0 + random * 1.0)
    panels[0].set(title="the blocks of one head", xlabel="block of keys", ylabel="block of queries")
    for name, edges in (("window", window), ("window, random", window | random), ("all three", window | random | ends)):
        reached, shares = torch.eye(32, dtype=torch.bool), []
        for _ in range(8):
            reached = (reached.float() @ edges.float()) > 0
            shares.append(reached.float().mean())
        panels[1].plot(range(1, 9), shares, marker="o", markersize=3, label=name)
    panels[1].set(title="blocks reached", xlabel="layers", ylim=(0, 1.6))
    panels[1].legend(loc="upper left")
    text = b"block i sees block i - 1, itself and block i + 1. the first and the last block are global. " * 2
    x = (model.embed(torch.tensor(list(text[:128]))) + model.position.weight)[None]
    layer = model.layers[1]
    x = x + model.layers[0](model.norms[0](x))
    x = x + model.feed[0](model.norms[1](x))
    q, k, _ = layer.qkv(model.norms[2](x)).view(1, 128, 3, 4, -1).permute(2, 0, 3, 1, 4)
    weights = masked(q, k, torch.eye(128).expand(1, 4, 128, 128), layer.drawn, 8)
    panels[2].imshow(weights[0, 0].detach().sqrt(), vmin=0, vmax=0.4)
    panels[2].set(title="a trained head", xlabel="key", ylabel="query")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
