# # Sparse Sinkhorn attention: sort the blocks, then look at the neighbour
#
# *Paper: Tay, Bahri, Yang, Metzler, Juan: Sparse Sinkhorn Attention (2020), arXiv 2002.11296; balancing: Sinkhorn, A
# Relationship Between Arbitrary Positive Matrices and Doubly Stochastic Matrices (1964). Members: `sinkhorn`. Measured:
# encoder_costs.*
#
# **Problem.** Attention within blocks of $b$ tokens costs $T b$ instead of $T^2$, but a token never sees another block.
# A fixed pattern of further blocks must fit every text.
#
# **Idea.** Learn which block each block looks at. A small network gives logits $R_{ij}$, how much block $i$ wants block
# $j$. They become a matrix $S$ whose rows and columns both sum to 1, a soft permutation, which brings one sorted block
# of keys and values to every block:
#
# $$ K'_i = \sum_j S_{ij} K_j, \quad V'_i = \sum_j S_{ij} V_j $$
#
# $$ y = \mathrm{softmax}(q [K'_i; K_i]^T / \sqrt{d}) [V'_i; V_i] $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Balancing
#
# Divide every row by its sum, then every column, and repeat: the matrix approaches one with all sums 1 (Sinkhorn's
# theorem). Logarithms keep large logits from overflowing. Why both? With rows alone, a softmax, all blocks could choose
# the same block, and the others would be seen by nobody. Balanced columns hand out every block once. After a few
# iterations the columns, divided last, sum to 1 exactly, and the rows nearly.
#
# A low temperature makes $S$ nearly a permutation. In training Gumbel noise is added to the logits, so that other
# permutations are tried.


def balance(logits, iterations):
    """logits [..., rows, columns] -> the balanced matrix of the same shape."""
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


# ## The sorting network, and the encoder
#
# A block is described by the sum of its tokens, and two linear layers make its row of logits, for every head. Sorting
# costs a product of all blocks for all blocks, $(T / b)^2$ sums of $b \times d$ numbers.
#
# The own block and the sorted block stand in one softmax: a token weighs near and far keys against each other. If there
# is one block, or if two blocks change places, this is exact softmax attention (with one block, every key just stands
# there twice).


class Sinkhorn(nn.Module):
    def __init__(self, dim, num_heads, block, max_length, iterations=5, temperature=0.75):
        super().__init__()
        self.num_heads, self.block, self.iterations, self.temperature = num_heads, block, iterations, temperature
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.inner, self.outer = nn.Linear(dim, dim), nn.Linear(dim, num_heads * (max_length // block))

    def heads(self, x):
        """x [batch, time, dim] -> q, k, v [batch, heads, blocks, block, head_dim]."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unflatten(1, (-1, self.block))
        return qkv.permute(3, 0, 4, 1, 2, 5)

    def logits(self, sums):
        """sums [batch, blocks, dim] -> [batch, heads, blocks, blocks]."""
        logits = self.outer(self.inner(sums).relu()).unflatten(-1, (self.num_heads, -1))[..., : sums.shape[1]]
        if self.training:
            logits = logits - torch.empty_like(logits).exponential_().log()
        return logits.transpose(1, 2) / self.temperature

    def attend(self, q, k, v, S, mask):
        """S [batch, heads, blocks, blocks], mask [blocks, block, 2 block] bool -> [batch, time, dim]."""
        k, v = (torch.cat([torch.einsum("bhij,bhjtd->bhitd", S, blocks), blocks], 3) for blocks in (k, v))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
        return self.out((scores.softmax(-1) @ v).permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2))

    def forward(self, x):
        q, k, v = self.heads(x)
        S = balance(self.logits(x.unflatten(1, (-1, self.block)).sum(2)), self.iterations)
        return self.attend(q, k, v, S, torch.ones(q.shape[2], self.block, 2 * self.block, dtype=torch.bool))


# ## The causal form
#
# A decoder must not know the future, and sorting has three ways to know it.
#
# 1. *The description.* The sum of block $i$ contains later tokens of the same block. So a causal block is described by
# the sum of all tokens *before* it.
#
# 2. *The choice.* Block $i$ may take earlier blocks alone: the logits of the others are masked.
#
# 3. *The balance.* The paper masks one matrix of all blocks and balances it. But a column sum runs over all rows: how
# much block 2 gets of block 0 is divided by a sum that contains how much block 5 wants of block 0, and block 5 has not
# been written yet. (Under this mask the only balanced matrix takes the block just before, so that iterations also undo
# the choice.)
#
# So each block $i$ gets a balance over its past: the square of the rows $1 \ldots i$ and the columns $0 \ldots i - 1$.
# Its last row is the row of block $i$. Only earlier blocks compete in it, and their logits depend on earlier tokens
# still. Block 0 has nothing before it and sees itself. In the sorted block all tokens are past; in the own block the
# usual triangle holds.


def past(logits, iterations):
    """logits [batch, heads, blocks, blocks] -> S of the same shape, 0 for the block itself and later ones."""
    S = torch.zeros_like(logits)
    for i in range(1, S.shape[2]):
        S[:, :, i, :i] = balance(logits[:, :, 1 : i + 1, :i], iterations)[:, :, -1]
    return S


class CausalSinkhorn(Sinkhorn):
    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        time, block = x.shape[1], self.block
        state = x if state is None else torch.cat([state, x], 1)
        x = F.pad(state, (0, 0, 0, -state.shape[1] % block))
        q, k, v = self.heads(x)
        sums = x.unflatten(1, (-1, block)).sum(2)
        logits = self.logits(sums.cumsum(1) - sums)
        S = past(logits, self.iterations)
        first = torch.arange(S.shape[2])[:, None, None] > 0
        mask = torch.cat([first.expand(-1, block, block), torch.ones(len(first), block, block).tril().bool()], -1)
        return self.attend(q, k, v, S, mask)[:, : state.shape[1]][:, -time:], state

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# A token costs $2 b$ scores. While generating, this page keeps the inputs and computes again; the library keeps the
# keys and values of all tokens and the sum of each block, so its state grows as a softmax cache does, and a new token
# costs $2 b$ scores. A new block costs one sorted block and one balance of its past. The causal form is exact softmax
# attention for up to two blocks: block 1 gets block 0, whatever the logits say. The length is bounded, as the last
# linear layer has a column for each block.
#
# The paper claims the quality of full attention at a fraction of the memory, on sorting, language, images and
# classification (one billion words: 40.79 of perplexity for 41.57 of the Transformer). Our result page "encoder_costs"
# measures the time of a training step: it grows as length$^{0.72}$ from 512 to 4,096 tokens (full attention: 1.37), and
# at 4,096 tokens it is 0.26 of the time of full attention. Quality is not measured there.
#
# Take it when a block should see a far block, and which one is to be learnt. Do not take it for short texts or brief
# training: before the sorting is learnt, the sorted block is a mean of all blocks, which says little. A model whose far
# block is chosen per query is `moba` or `nsa`.

# --- proof ---
# The library's layers with the same weights give the same outputs, gradients and (causal) streamed steps. Exact limits
# hold, and only the balance over the past is causal.


import proofs

import kinformer


def proof():
    x = torch.randn(2, 48, 32)
    names = {"projection.qkv": "qkv", "out": "out"}
    names = {f"inner.{there}": here for there, here in names.items()}
    sorting = {"inner.sorting.inner": "inner", "inner.sorting.outer": "outer"}
    causal = {"inner.inner": "inner", "inner.outer": "outer"}
    for block, iterations in ((8, 5), (16, 2)):
        sizes = {"num_heads": 4, "block": block, "max_length": 64, "iterations": iterations}
        print(f"bidirectional, blocks of {block}")
        page = Sinkhorn(32, 4, block, 64, iterations).eval()
        proofs.compare(page, kinformer.layer("sinkhorn", 32, **sizes).eval(), names | sorting, x)
        print(f"causal, blocks of {block}")
        page = CausalSinkhorn(32, 4, block, 64, iterations).eval()
        library = kinformer.layer("causal_sinkhorn", 32, **sizes).eval()
        proofs.compare(page, library, names | causal, x, page.step)
    print("exact limits")
    page = Sinkhorn(32, 4, 48, 48).eval()
    q, k, v = (part.flatten(2, 3) for part in page.heads(x))
    exact = page.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    proofs.equal("one block and softmax attention", page(x), exact)
    page = CausalSinkhorn(32, 4, 24, 48).eval()
    q, k, v = (part.flatten(2, 3) for part in page.heads(x))
    exact = page.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    proofs.equal("two causal blocks and softmax attention", page(x), exact)
    ours, published = leaks()
    assert ours[:5].max() == 0 and published[1:5].min() > 1e-4


def leaks():
    """How much each row of S changes when the logits of blocks 5 to 7 change: here, and in the published form."""
    logits = torch.randn(1, 1, 8, 8) * 3
    changed = torch.cat([logits[:, :, :5], torch.randn(1, 1, 3, 8) * 3], 2)

    def published(logits):
        masked = logits[:, :, 1:, :-1].masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -30)
        return F.pad(balance(masked, 5), (0, 1, 1, 0))

    return [(form(changed) - form(logits)).abs().amax(-1)[0, 0] for form in (lambda logits: past(logits, 5), published)]


def train():
    return proofs.train(lambda: CausalSinkhorn(64, 4, 16, 128), __file__)


@torch.no_grad()
def draw(figure, model):
    """A soft permutation, the trained causal weights, and what changes when later blocks change."""
    free, causal, future = figure.subplots(1, 3)
    free.imshow(balance(torch.randn(8, 8) * 4, 5), vmin=0, vmax=1)
    free.set(title="soft permutation", xlabel="block", ylabel="for block")
    with open(__file__, "rb") as file:
        x = model.norms[0](model.embed(torch.tensor(list(file.read(128)))[None]) + model.position.weight)
    layer = model.layers[0]
    sums = x.unflatten(1, (-1, layer.block)).sum(2)
    layer.eval()
    causal.imshow(past(layer.logits(sums.cumsum(1) - sums), layer.iterations)[0, 0], vmin=0, vmax=1)
    causal.set(title="causal, trained", xlabel="block")
    ours, published = leaks()
    future.bar(torch.arange(8) - 0.2, ours, 0.4, label="balance of the past")
    future.bar(torch.arange(8) + 0.2, published, 0.4, label="masked balance of all")
    future.axvline(4.5, color="gray", linestyle=":")
    future.set(
        title="blocks 5 to 7 change", xlabel="for block", ylabel="change of its weights", ylim=(0, 1.5), xticks=range(8)
    )
    future.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
