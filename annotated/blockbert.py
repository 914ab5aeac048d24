# # BlockBERT: one block of keys for each head
#
# *Paper: Qiu et al., Blockwise Self-Attention for Long Document Understanding (2020), arXiv 1911.02972. Members:
# `blockbert`. Measured: estimate_peak.*
#
# **Problem.** The scores of attention take memory that grows with the square of the length: 12 heads and 1,024 tokens
# make 12.6 million numbers a layer and text. In training they are kept for the backward pass.
#
# **Idea.** Cut the text into $n$ blocks. In a head, each block of queries sees exactly one block of keys. A permutation
# $\pi$ of the blocks says which, and different heads have different permutations:
#
# $$ Y_i = \mathrm{softmax}(Q_i K_{\pi(i)}^\top / \sqrt{d})\, V_{\pi(i)}, \quad i = 1 \dots n $$

import math

import torch
from torch import nn

# ## Permutations
#
# The identity lets each block read itself: near tokens. The paper's other permutations are shifts, $\pi(i) = i + s$
# modulo $n$: tokens a fixed number of blocks away. The paper gives most heads the identity, because near tokens matter
# most: of 12 heads 10 read their block and 2 the next, for $n = 2$; for $n = 3$ they are 8, 2 and 2.


def shifts(heads):
    """heads[s]: the number of heads with the shift s -> one permutation for each head."""
    blocks = len(heads)
    return [[(i + s) % blocks for i in range(blocks)] for s, count in enumerate(heads) for _ in range(count)]


# ## First form: a mask
#
# In the matrix of all pairs a head sees $n$ squares, one in each row and each column of blocks. A block has $\lceil T /
# n \rceil$ tokens. The softmax normalises over one block of keys, so the weights of each head sum to 1.


def masked(q, k, v, permutations):
    """q, k, v [batch, heads, time, head_dim] -> the same shape."""
    permutation = torch.tensor(permutations)
    block = torch.arange(q.shape[2]) // math.ceil(q.shape[2] / permutation.shape[1])
    seen = permutation[:, block][..., None] == block
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~seen, lowest).softmax(-1).masked_fill(~seen, 0) @ v


# (The last block is shorter when $n$ does not divide the length. Very short texts can leave a block empty, and a query
# whose block is empty gets 0.)

# ## Second form: move the blocks, and no mask
#
# Reorder the blocks of keys and values in each head, and multiply block by block. The scores are then a tensor [batch,
# heads, blocks, $T / n$, $T / n$]: $n$ times fewer than before, and no score is computed in vain.


def blockwise(q, k, v, permutations):
    """The same function for a length that the number of blocks divides."""
    permutation = torch.tensor(permutations)
    head = torch.arange(q.shape[1])[:, None]
    q, k, v = (x.unflatten(2, (permutation.shape[1], -1)) for x in (q, k, v))
    k, v = k[:, head, permutation], v[:, head, permutation]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1) @ v).flatten(2, 3)


# ## The layer
#
# The rest is BERT's multi-head attention. Tokens see later tokens, so the layer is for encoders: it generates no text
# and stores nothing. A shift by $s$ would break causality, as block 1 reads block $1 + s$.
#
# A token of block $i$ reaches block $j$ in one layer if some head has the shift $j - i$. With $n$ shifts all tokens
# reach all others in one layer, but each through one head. With $n = 1$ the layer is exact softmax attention.


class BlockwiseAttention(nn.Module):
    def __init__(self, dim, heads):
        """heads: as for `shifts`."""
        super().__init__()
        self.permutations = shifts(heads)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        """x [batch, time, dim] -> the same shape."""
        heads, blocks = len(self.permutations), len(self.permutations[0])
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        y = (masked if x.shape[1] % blocks else blockwise)(q, k, v, self.permutations)
        return self.out(y.transpose(1, 2).flatten(2))


# ## Costs, and when to take it
#
# | 12 heads, 1,024 tokens | scores a layer and text | keys of a token and head |
# | --- | --- | --- |
# | BERT | 12.6 million | 1,024 |
# | 2 blocks | 6.3 million | 512 |
# | 3 blocks | 4.2 million | 342 |
#
# The number of blocks is fixed, so the cost still grows with the square of the length: $T^2 / n$ scores. Take it when a
# BERT must fit into less memory. Do not take it when the cost should grow linearly: `longformer` and `big-bird` do
# that.
#
# The paper reports 18.7 to 36.1 % less memory and 12.0 to 25.1 % less training time than RoBERTa, at comparable
# accuracy on question answering. On our result page "estimate_peak" a small `blockbert` of 2 blocks trains on 8 texts
# of 512 tokens in a process of 1,055 MB, and `bert` in one of 1,087 MB; 458 MB of both are Python and PyTorch. The
# share of the scores is small at this length. We have not measured its accuracy.

# --- proof ---
# The library's layer with the same weights gives the same outputs and gradients, also where the number of blocks does
# not divide the length. With one block it is the library's full attention.


import proofs

import kinformer


def proof():
    names = {"inner.projection.qkv": "qkv", "inner.out": "out"}
    for time, heads in ((48, (3, 1)), (48, (2, 1, 1)), (47, (2, 1, 1)), (9, (1, 1, 1, 1)), (5, (1, 1, 1, 1))):
        print(f"{time} tokens, {len(heads)} blocks, heads by shift: {heads}")
        page = BlockwiseAttention(32, heads)
        pattern = {"kind": "blockwise", "block": None, "permutations": shifts(heads)}
        library = kinformer.layer("blockbert", 32, num_heads=4, pattern=pattern)
        proofs.compare(page, library, names, torch.randn(2, time, 32))
    q, k, v = torch.randn(3, 2, 4, 48, 8)
    proofs.equal("moved blocks", blockwise(q, k, v, shifts((2, 1, 1))), masked(q, k, v, shifts((2, 1, 1))))
    print("one block, beside full attention")
    proofs.compare(
        BlockwiseAttention(32, (4,)), kinformer.layer("bert", 32, num_heads=4), names, torch.randn(2, 48, 32)
    )


def train():
    return proofs.train(lambda: BlockwiseAttention(64, (2, 1, 1)), __file__, length=126, causal=False)


def draw(figure, model):
    """The weights of the heads of a trained layer, by their shifts; and the scores of a text by its length."""
    text = b"in a head, each block of queries sees exactly one block of keys. " * 2
    x = (model.embed(torch.tensor(list(text[:126]))) + model.position.weight)[None]
    layer = model.layers[0]
    q, k, _ = layer.qkv(model.norms[0](x)).view(1, 126, 3, 4, -1).permute(2, 0, 3, 1, 4)
    weights = masked(q, k, torch.eye(126).expand(1, 4, 126, 126), layer.permutations)[0].detach()
    *heads, scores = figure.subplots(1, 4)
    for axes, head in zip(heads, (0, 2, 3), strict=True):
        axes.imshow(weights[head].sqrt(), vmin=0, vmax=0.5)
        axes.set(title=f"shift {max(0, head - 1)}", xlabel="key", ylabel="query" if head == 0 else "")
    length = torch.arange(1, 2049)
    for blocks in (1, 2, 3):
        scores.plot(length, 12 * length**2 / blocks / 1e6, label=f"blocks: {blocks}")
    scores.set(title="million scores", xlabel="tokens", ylim=(0, 80))
    scores.legend()


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
