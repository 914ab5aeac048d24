# # NSA: summaries, chosen blocks and a window
#
# *Paper: Yuan et al., Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention (2025), arXiv
# 2502.11089. Members: `nsa`. Measured: chosen_blocks, modern_lengths, modern_parts, mqar.*
#
# **Problem.** Attention that chooses blocks must know which blocks matter before it reads them. A choice added after
# training is often wrong, and separate choices of all heads read many blocks, which is slow on hardware.
#
# **Idea.** Read the past in three ways, and let a gate mix them: summaries of all blocks, all tokens of a few chosen
# blocks, and a window of the last tokens.
#
# $$ y = g^{\mathrm{cmp}} y^{\mathrm{cmp}} + g^{\mathrm{slc}} y^{\mathrm{slc}} + g^{\mathrm{win}} y^{\mathrm{win}},
# \quad g = \sigma(W_g x) $$
#
# The weights over the summaries also choose the blocks. So the choice costs nothing extra, and it is trained, because
# the summaries themselves are attended to.

import math

import torch
from torch import nn


def rotate(x, positions, base=10000.0):
    """Rotary positions: x [..., time, head_dim] at positions [time] -> turned x."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * base ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


# ## Attention over a set
#
# All three branches are softmax attention over a set of keys, each with its own softmax. So the weights of a branch sum
# to 1, and the gates alone say how much a branch counts. (One softmax over all would let the many tokens of the window
# drown the summaries.) Before the first summary is complete, its branch gives 0.


def weights(q, k, seen):
    """q [batch, heads, time, head_dim], k [batch, heads, keys, head_dim], seen bool -> [batch, heads, time, keys]."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~seen, 0)


# ## First branch: summaries
#
# A summary stands for $l$ tokens, and one begins every $s$ tokens; with $s < l$ they overlap. Here a summary is the
# mean of the keys, and of the values. (The paper has a learned perceptron over the tokens of a block; it stands below,
# beside the proof.)
#
# A query sees a summary only when all of its tokens are there, the query included. An unfinished summary would change
# with later tokens, and break causality.


def summaries(x, length, stride):
    """x [batch, heads, time, head_dim] -> means [batch, heads, summaries, head_dim]."""
    return x.unfold(2, length, stride).mean(-1) if x.shape[2] >= length else x[:, :, :0]


# ## Second branch: chosen blocks
#
# The importance of a block of $B$ tokens is the weight of the summaries that share tokens with it (equation 9 of the
# paper): each summary counts as often as it shares a stretch of $s$ tokens. With summaries of whole blocks, it is
# simply the weight of the block's summary.
#
# Heads that share keys choose together, by the sum of their weights (equation 10). A chosen block is then loaded once
# for the whole group, which makes reading fast. Some blocks are always seen: the current one up to the query, the
# first, and the one before the current.


def choose(p, i, blocks, block, count, length, stride):
    """p [batch, groups, time, summaries] summed over a group; i [time, 1] -> bool [batch, groups, time, blocks]."""
    unit, span, size = torch.arange(blocks * block // stride), length // stride, block // stride
    covered = (unit >= unit[: p.shape[-1], None]) & (unit < unit[: p.shape[-1], None] + span)
    shared = covered.unflatten(-1, (blocks, size)).sum(-1).to(p.dtype)  # [summaries, blocks]
    index, current = torch.arange(blocks), i // block
    always = (index == 0) | (index >= current - 1)
    importance = (p @ shared).masked_fill(always, torch.inf).masked_fill(index >= current, -torch.inf)
    best = importance.topk(min(count - 1, blocks), -1).indices
    return torch.zeros_like(importance, dtype=torch.bool).scatter(-1, best, True) & (index < current)


# ## The layer
#
# The third branch is a window of the last tokens, so the other two branches learn to look far away.
#
# A later query may choose any block, so all keys and values are stored, and a fast form stores the summaries too. Few
# heads of keys make this cache small, and all branches share them here. (In the paper each branch has other keys and
# values.) With blocks and summaries of one token, all blocks seen, and a window as long as the text, every branch is
# exact softmax attention over the past.


class NativeSparseAttention(nn.Module):
    summarise_keys = summarise_values = staticmethod(summaries)

    def __init__(self, dim, num_heads, groups, block, count, window, length=None, stride=None):
        super().__init__()
        self.heads, self.groups, self.head_dim = num_heads, groups, dim // num_heads
        self.block, self.count, self.window = block, count, window
        self.length, self.stride = length or block, stride or length or block
        self.qkv = nn.Linear(dim, (num_heads + 2 * groups) * self.head_dim, bias=False)
        self.gates = nn.Linear(dim, 3 * num_heads, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def project(self, x, start):
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], 1)
        positions = start + torch.arange(x.shape[1])
        return rotate(q, positions), rotate(k, positions), v

    def sets(self, q, k):
        """Return the weights over the summaries, and which tokens the other two branches see."""
        slots, together = k.shape[2], self.heads // self.groups
        i, j = torch.arange(slots - q.shape[2], slots)[:, None], torch.arange(slots)
        means = self.summarise_keys(k, self.length, self.stride).repeat_interleave(together, 1)
        complete = torch.arange(means.shape[2]) * self.stride + self.length <= i + 1
        p = weights(q, means, complete)
        blocks = -(-slots // self.block)
        group = p.unflatten(1, (self.groups, together)).sum(2)
        chosen = choose(group, i, blocks, self.block, self.count, self.length, self.stride)
        own = (j // self.block == i // self.block) & (j <= i)
        chosen = chosen.repeat_interleave(self.block, -1)[..., :slots].repeat_interleave(together, 1) | own
        return p, chosen, (j <= i) & (i - j < self.window)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, v = self.project(x, 0 if state is None else state[0].shape[2])
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        p, chosen, near = self.sets(q, k)
        means = self.summarise_values(v, self.length, self.stride)
        keys, values, means = (item.repeat_interleave(self.heads // self.groups, 1) for item in (k, v, means))
        branches = torch.stack([p @ means, weights(q, keys, chosen) @ values, weights(q, keys, near) @ values], -1)
        gates = self.gates(x).sigmoid().unflatten(-1, (self.heads, 3)).transpose(1, 2)
        y = (branches * gates[..., None, :]).sum(-1)
        return self.out(y.transpose(1, 2).flatten(2)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# One more token after $T$ others reads $T / s$ summaries, $n B$ tokens of chosen blocks and $W$ of the window. With the
# paper's $s = 16$, $n = 16$, $B = 64$, $W = 512$ and $T = 65{,}536$ this is 5,632 instead of 65,536. Take it for texts
# of many thousands of tokens with few heads of keys. Do not take it for short texts, where three branches cost more.
#
# The paper reports losses below full attention with a 27B model, and 11.6 times less memory traffic for a token at
# 65,536. On our result page "chosen_blocks" a training step of 32,768 tokens takes 0.31 of full attention's time on a
# processor, and on "mqar" NSA recalls 99 %. On "modern_parts" it has 2.116 bits per byte with texts too short for it.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


class Perceptron(nn.Module):
    """The paper's summary of a block: a perceptron with learned places, [..., length, head_dim] -> [..., head_dim]."""

    def __init__(self, groups, length, head_dim):
        super().__init__()
        self.places = nn.Parameter(torch.randn(groups, 1, length, head_dim))
        self.hidden, self.out = nn.Linear(length * head_dim, 2 * head_dim), nn.Linear(2 * head_dim, head_dim)

    def forward(self, x):
        return self.out(self.hidden((x + self.places).flatten(-2)).relu())


class WithPerceptrons(NativeSparseAttention):
    """Keys are turned back to the place where their block begins, and their summary is turned to it again."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.keys, self.values = (Perceptron(self.groups, self.length, self.head_dim) for _ in range(2))

    def summarise_keys(self, k, length, stride):
        if k.shape[2] < length:
            return k[:, :, :0]
        blocks = k.unfold(2, length, stride).permute(0, 1, 4, 2, 3)  # [batch, groups, length, blocks, head_dim]
        begins = torch.arange(blocks.shape[3]) * stride
        return rotate(self.keys(rotate(blocks, -begins).transpose(2, 3)), begins)

    def summarise_values(self, v, length, stride):
        return self.values(v.unfold(2, length, stride).transpose(-2, -1)) if v.shape[2] >= length else v[:, :, :0]


def proof():
    names = {"inner.projection.qkv": "qkv", "inner.branch_gates": "gates", "inner.out": "out"}
    for settings in ((1, 4, 5, 6, None, None), (2, 4, 4, 9, 8, 4), (2, 8, 4, 5, 4, 2)):
        groups, block, count, window, length, stride = settings
        print(f"heads of keys: {groups}, {count} blocks of {block}, window {window}, summaries: {length or block}")
        page = NativeSparseAttention(32, 4, *settings)
        sizes = {"block": block, "count": count, "window": window, "projection.num_kv_heads": groups}
        more = {"summary_length": length, "summary_stride": stride}
        library = kinformer.layer("nsa", 32, num_heads=4, set=sizes | more)
        proofs.compare(page, library, names, torch.randn(2, 50, 32), page.step)
    print("summaries by perceptrons")
    page = WithPerceptrons(32, 4, *settings)
    library = kinformer.layer("nsa", 32, num_heads=4, compression="mlp", set=sizes | more)
    for there, here in (("key", "keys"), ("value", "values")):
        names |= {f"inner.{there}_summary.{part}": f"{here}.{part}" for part in ("hidden", "out")}
        names[f"inner.{there}_summary.places"] = lambda weights, here=here: weights[f"{here}.places"][:, 0]
    proofs.compare(page, library, names, torch.randn(2, 50, 32), page.step)
    print("blocks of one token, all seen: every branch is full attention")
    page = NativeSparseAttention(32, 4, 2, 1, 50, 50)
    q, k, _ = page.project(torch.randn(2, 50, 32), 0)
    full = weights(q, k.repeat_interleave(2, 1), torch.ones(50, 50, dtype=torch.bool).tril())
    for seen in page.sets(q, k)[1:]:
        proofs.equal("weights", weights(q, k.repeat_interleave(2, 1), seen), full)
    proofs.equal("weights of summaries", page.sets(q, k)[0], full)


def train():
    return proofs.train(lambda: NativeSparseAttention(64, 4, 1, 8, 5, 8), __file__)


def draw(figure, model):
    """The three branches of a trained layer: weights of summaries, chosen blocks, the window; and the gates."""
    text = (
        b"A chosen block is then loaded once for the whole group, which makes reading fast. A chosen block is then load"
    )
    x = (model.embed(torch.tensor(list(text))) + model.position.weight[: len(text)])[None]
    layer = model.layers[0]
    x = model.norms[0](x).detach()
    q, k, _ = layer.project(x, 0)
    p, chosen, near = layer.sets(q, k)
    one, two, three, gates = figure.subplots(1, 4)
    one.imshow(p[0].mean(0).detach().sqrt(), aspect="auto", interpolation="nearest")
    one.set(title="summaries", xlabel="summary", ylabel="query")
    two.imshow(chosen[0, 0], aspect="auto", interpolation="nearest")
    two.set(title="chosen blocks", xlabel="key")
    three.imshow(near, aspect="auto", interpolation="nearest")
    three.set(title="window", xlabel="key")
    opened = layer.gates(x).sigmoid().unflatten(-1, (4, 3))[0].mean(0).detach()
    for branch, name in enumerate(("summaries", "chosen", "window")):
        gates.bar(torch.arange(4) + 0.25 * (branch - 1), opened[:, branch], 0.25, label=name)
    gates.set(title="mean gates", xlabel="head", ylim=(0, 1.3), xticks=range(4))
    gates.legend(fontsize=7)


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
