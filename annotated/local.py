# # Local attention: a sliding window
#
# *Paper: Jiang et al., Mistral 7B (2023), arXiv 2310.06825; a local window: Liu et al., Generating Wikipedia by
# Summarizing Long Sequences (2018), arXiv 1801.10198. Members: `local`. Measured: sparse, window_length,
# causal_members.*
#
# **Problem.** Full attention compares every token with every earlier token. The cost of a text grows with the square of
# its length, and the cache of a model that generates grows with every token. Most of the weight often lies on the last
# few hundred tokens.
#
# **Idea.** A token sees itself and the $W - 1$ tokens before it. All other weights are zero:
#
# $$ y_i = \sum_{j = i - W + 1}^{i} p_{ij} v_j, \quad
# p_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt{d})}{\sum_{m = i - W + 1}^{i} \exp(q_i \cdot k_m / \sqrt{d})} $$

import math

import torch
from torch import nn

# ## Positions are distances
#
# A window slides, so a token should know how far back a key lies, and not where the key stands in the text. Rotary
# positions give that. The features of a query and of a key are paired, and each pair is turned by an angle in
# proportion to the position. The product of a turned query with a turned key depends on the difference of the two
# positions alone:
#
# $$ R(a)\,q \cdot R(b)\,k = q \cdot R(b - a)\,k $$


def rotate(x, start, base=10000.0):
    """x [batch, heads, time, head_dim] of the positions start, start + 1, ... -> turned x."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half) / half)
    angle = (start + torch.arange(x.shape[2]))[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


# ## First form: a band in the matrix of scores
#
# The softmax normalises over the window alone, so the weights of a token sum to 1 at every position. The first tokens
# of a text have fewer keys. The lower bound of the distance, zero, makes the layer causal.
#
# With $W$ at least as large as the length, the band holds the whole triangle: the layer is then exact causal softmax
# attention.


def windowed(q, k, v, window):
    """q [batch, heads, time, head_dim] belongs to the last keys; k, v [batch, heads, past + time, head_dim]."""
    slots = k.shape[2]
    distance = torch.arange(slots - q.shape[2], slots)[:, None] - torch.arange(slots)
    seen = (distance >= 0) & (distance < window)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


# ## Second form: blocks, for training
#
# The mask hides scores, but the product computed them. Blocks of $W$ queries avoid that: the queries of a block see no
# key before the $W - 1$ tokens in front of the block. Each block computes at most $W (2W - 1)$ scores, and a text of
# $T$ tokens has $T / W$ blocks. So the cost is about $2 T W$ scores instead of $T^2$.


def blocked(q, k, v, window):
    """The outputs of `windowed` for a whole text; q, k, v [batch, heads, time, head_dim]."""
    outputs = []
    for begin in range(0, q.shape[2], window):
        first, end = max(0, begin - window + 1), begin + window
        outputs.append(windowed(q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end], window))
    return torch.cat(outputs, 2)


# ## The layer, and its state of constant size
#
# A key outside the window is never read again, so the layer drops it. The state holds the last $W - 1$ keys and values,
# and the number of tokens so far, which the rotation needs. The keys are stored turned: a position counts from the
# beginning of the text and never changes. (Mistral writes the keys into a ring buffer, at the position modulo $W$. The
# order of keys does not matter to a softmax.)
#
# One more token costs $W$ comparisons at every position.


class LocalAttention(nn.Module):
    def __init__(self, dim, num_heads, window):
        super().__init__()
        self.num_heads, self.window = num_heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def project(self, x, start):
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return rotate(q, start), rotate(k, start), v

    def forward(self, x):
        y = blocked(*self.project(x, 0), self.window)
        return self.out(y.transpose(1, 2).flatten(2))

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        seen = 0 if state is None else state[2]
        q, k, v = self.project(x, seen)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        y = windowed(q, k, v, self.window)
        first = max(0, k.shape[2] - self.window + 1)
        return self.out(y.transpose(1, 2).flatten(2)), (k[:, :, first:], v[:, :, first:], seen + x.shape[1])


# ## Costs, and when to take it
#
# | | full attention | a window of $W$ |
# | --- | --- | --- |
# | scores of a text of $T$ tokens | $T^2 / 2$ | $T W$ |
# | scores of one more token | $T$ | $W$ |
# | numbers in the state, width 512, after 100,000 tokens | 102 million | 0.26 million with $W = 256$ |
#
# Layers extend the reach. A token of layer $L$ depends on at most $L (W - 1)$ earlier tokens, but what lies outside the
# window arrives as a summary that other tokens made. Mistral's 32 layers with $W = 4096$ reach 131,000 tokens; the
# paper reports twice the speed of full attention at 16,384 tokens, and a cache one eighth as large at 32,768.
#
# Take it when the recent past decides, in texts of any length. Do not take it when one token far beyond all windows
# must be recalled exactly; mix it with full attention in some layers then.
#
# On our result page "sparse" a window of 256 takes 54 ms for 4,096 tokens, forward and backward, and full attention 218
# ms. On "window_length" a step of 65,536 tokens takes 16 to 19 s, whether it has 32 texts of 2,048 tokens or one text.
# On "causal_members", with texts of 256 tokens, `local` reaches 2.024 bits per byte, `rope` 1.984 and `gpt` 2.071 in
# the same minute and a half.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps. With a window as long
# as the text the page's layer is the library's rotary attention to all earlier tokens.


import proofs

import kinformer


def proof():
    names = {"inner.projection.qkv": "qkv", "inner.out": "out"}
    for window in (1, 7, 40):
        print(f"a window of {window} tokens")
        page = LocalAttention(32, 4, window)
        library = kinformer.layer("local", 32, num_heads=4, pattern={"kind": "local", "window": window})
        proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)
        q, k, v = torch.randn(3, 2, 4, 40, 8)
        proofs.equal("blocks and band", blocked(q, k, v, window), windowed(q, k, v, window))
    print("a window as long as the text, beside attention to all earlier tokens")
    proofs.compare(
        page,
        kinformer.layer("rope", 32, num_heads=4, set={"position.layout": "half"}),
        names,
        torch.randn(2, 40, 32),
        page.step,
    )


def train():
    return proofs.train(lambda: LocalAttention(64, 4, 16), __file__)


def draw(figure, model):
    """How much the outputs depend on earlier inputs, after one layer and after two; and the size of the state."""
    tokens = torch.tensor(list(b"def windowed(q, k, v, window): a token sees itself and the tokens before it"))
    x = (model.embed(tokens) + model.position.weight[: len(tokens)])[None].detach()
    one, two, size = figure.subplots(1, 3)
    for axes, depth in ((one, 1), (two, 2)):
        inputs = x.clone().requires_grad_()
        y = inputs
        for i in range(depth):
            y = y + model.layers[i](model.norms[2 * i](y))
            y = y + model.feed[i](model.norms[2 * i + 1](y))
        rows = [
            torch.autograd.grad(y[0, t].sum(), inputs, retain_graph=True)[0][0].norm(dim=-1) for t in range(len(tokens))
        ]
        axes.imshow(torch.stack(rows).clamp_min(1e-4).log10(), vmin=-3)
        axes.set(title=f"layers: {depth}, reach: {depth * 15}", xlabel="input", ylabel="output")
    lengths = torch.arange(1, 2001)
    size.plot(lengths, 0.128 * lengths, label="full attention")
    size.plot(lengths, 0.128 * lengths.clamp_max(255), label="a window of 256")
    size.set(title="state, thousands", xlabel="tokens", ylim=(0, 340))
    size.legend()


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
