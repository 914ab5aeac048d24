# # MoBA: each query chooses its blocks
#
# *Paper: Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs (2025), arXiv 2502.13189. Members: `moba`.
# Measured: chosen_blocks, modern_lengths, mqar, causal_members.*
#
# **Problem.** In a text of 100,000 tokens a query gives its weight to a few places, but full attention reads all of it.
# A window or a stride decides beforehand where these places are, and is wrong for some queries.
#
# **Idea.** Cut the text into blocks, and let every query choose the few blocks that fit it best, as a mixture of
# experts chooses experts. The score of a block is the product of the query with the mean of the block's keys. Then
# softmax attention runs over the tokens of the chosen blocks:
#
# $$ s_{ib} = q_i \cdot \bar k_b, \quad \bar k_b = \frac{1}{B} \sum_{j \in b} k_j, \qquad
# y_i = \sum_{j \le i,\; b(j) \in C_i} p_{ij} v_j, \quad p_{ij} \propto \exp(q_i \cdot k_j / \sqrt{d}) $$
#
# Here $C_i$ holds the block of the query and the $n - 1$ earlier blocks with the largest $s_{ib}$.

import math

import torch
from torch import nn

# ## Positions
#
# Queries and keys are turned by their positions (rotary positions), so a score depends on the distance. The mean of a
# block is taken over turned keys, and so knows roughly how far away the block lies.


def rotate(x, start, base=10000.0):
    """x [batch, heads, time, head_dim] of the positions start, start + 1, ... -> turned x."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half) / half)
    angle = (start + torch.arange(x.shape[2]))[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


# ## The choice, and what keeps it causal
#
# Two rules keep the layer causal. A block after the query's is never chosen. And the query's own block is always seen,
# up to the query, but never scored: the mean of an unfinished block would contain keys of the future.
#
# So only earlier blocks compete, and these are complete. A gradient does not pass through the choice. The model learns
# through the attention inside chosen blocks: a block that helps gets keys closer to the query, and its mean moves with
# them.


def choose(q, k, block, count):
    """q of the last positions, k of all, [batch, heads, time, head_dim] -> chosen bool [batch, heads, time, blocks]."""
    complete = k.shape[2] // block
    means = k[:, :, : complete * block].unflatten(2, (complete, block)).mean(3)
    current = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] // block
    earlier = torch.arange(complete) < current
    scores = (q @ means.transpose(-2, -1)).masked_fill(~earlier, -torch.inf)
    best = scores.topk(min(count - 1, complete), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & earlier


# ## Attention over the chosen blocks
#
# One softmax covers all chosen tokens and the own block, so the weights sum to 1, and tokens of different blocks
# compete directly. Early queries have fewer than $n - 1$ earlier blocks and see them all.
#
# When the text has at most $n$ blocks, every query sees its whole past: exact causal softmax attention with the same
# weights. A model can therefore be trained with full attention first, or use it in some layers, and switch.


def attention(q, k, v, block, count):
    slots = k.shape[2]
    i, j = torch.arange(slots - q.shape[2], slots)[:, None], torch.arange(slots)
    own = (j // block == i // block) & (j <= i)
    chosen = choose(q, k, block, count).repeat_interleave(block, -1)  # one column for each key of a complete block
    chosen = nn.functional.pad(chosen, (0, slots - chosen.shape[-1]))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~(own | chosen), -torch.inf).softmax(-1) @ v


# ## The layer
#
# Nothing can be dropped while the model generates, because a later query may choose any block. So the state is the full
# cache of keys and values, and a fast form adds the means of complete blocks. Only the reading becomes cheap.


class BlockAttention(nn.Module):
    def __init__(self, dim, num_heads, block, count):
        super().__init__()
        self.num_heads, self.block, self.count = num_heads, block, count
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def project(self, x, start):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return rotate(q, start), rotate(k, start), v

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, v = self.project(x, 0 if state is None else state[0].shape[2])
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        y = attention(q, k, v, self.block, self.count)
        return self.out(y.transpose(1, 2).flatten(2)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# | | full attention | MoBA, $n$ blocks of $B$ tokens |
# | --- | --- | --- |
# | scores of one more token | $T$ | $T / B$ means, and $n B$ keys |
# | after 32,768 tokens, $n = 4$, $B = 256$ | 32,768 | 128 and 1,024 |
# | stored numbers a token and head | $2 d$ | $2 d + d / B$ |
#
# Take it when texts have many thousands of tokens and a token needs only a few places. Do not take it when texts are
# short, or the state must not grow.
#
# The paper trains with blocks of 512 and 3 chosen, matches the loss of full attention, and reports 6.5 times its speed
# at a million tokens. Our result page "chosen_blocks" measures one layer on one thread of a processor: training pays
# from 4,096 tokens on with blocks of 64 and from 8,192 on with blocks of 256. At 32,768 tokens four blocks of 256 take
# 6.1 s where full attention takes 25.2 s, and one more token takes 4.9 instead of 11.4 ms. On "mqar" MoBA recalls 98 to
# 99 %, with 3 of 8 blocks.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps. With as many blocks as
# the text has, the page's layer is the library's full attention with rotary positions.


import proofs

import kinformer


def proof():
    names = {"inner.projection.qkv": "qkv", "inner.out": "out"}
    for block, count in ((4, 3), (7, 2), (1, 9), (8, 5)):
        print(f"blocks of {block} tokens, {count} seen")
        page = BlockAttention(32, 4, block, count)
        library = kinformer.layer("moba", 32, num_heads=4, set={"block": block, "count": count})
        proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)
    print("all five blocks seen, beside full attention")
    library = kinformer.layer("rope", 32, num_heads=4, set={"position.layout": "half"})
    proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)


def train():
    return proofs.train(lambda: BlockAttention(64, 4, 8, 3), __file__)


def draw(figure, model):
    """The blocks that two trained heads choose, and how many keys one more token reads."""
    text = (
        b"a block that helps gets keys closer to the query, and its mean moves with them. a block that helps gets keys"
    )
    x = (model.embed(torch.tensor(list(text))) + model.position.weight[: len(text)])[None]
    x = x + model.layers[0](model.norms[0](x))
    x = x + model.feed[0](model.norms[1](x))
    layer = model.layers[1]
    q, k, _ = layer.project(model.norms[2](x), 0)
    chosen = choose(q, k, 8, 3).float()
    *heads, cost = figure.subplots(1, 3)
    for head, axes in enumerate(heads):
        for t in range(len(text)):
            if t // 8 < chosen.shape[-1]:
                chosen[0, head, t, t // 8] = 2
        axes.imshow(chosen[0, head], aspect="auto", interpolation="nearest")
        axes.set(title=f"head {head}: chosen, and own", xlabel="block", ylabel="query" if head == 0 else "")
    length = torch.arange(1, 33) * 1024
    cost.plot(length, length, label="full attention")
    for block, count in ((256, 4), (64, 8)):
        cost.plot(length, length / block + block * count, label=f"{count} blocks of {block}")
    cost.set(title="keys and means read", xlabel="tokens", yscale="log", ylim=(300, 3e5))
    cost.legend()


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
