# # Universal Transformer: one layer again and again, until a token halts
#
# *Paper: Dehghani, Gouws, Vinyals, Uszkoreit, Kaiser: Universal Transformers (2019), arXiv 1807.03819; halting: Graves,
# Adaptive Computation Time for Recurrent Neural Networks (2016), arXiv 1603.08983. Members: `universal`. Measured:
# ponder, ponder_copy, ponder_addition.*
#
# **Problem.** A Transformer has as many steps of computation as it has layers, for every token and every length. An
# operation that a problem repeats must be learnt once per layer, and easy tokens cost as much as hard ones.
#
# **Idea.** Apply one layer $f$ again and again, with the same weights, and let every token decide when it stops. After
# each step a token halts with a probability $p$. When these probabilities add up to 1, it stops:
#
# $$ y^{(n)} = f(x^{(n)}), \quad p^{(n)} = \sigma(w \cdot x^{(n)} + b) $$
#
# $$ N = \min \{ n : \sum_{m \le n} p^{(m)} > 1 - \epsilon \} $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The place and the step
#
# With equal weights in every step, a layer cannot know how often it has run, and attention alone does not know the
# order of tokens. So both are added to the input of every step: a signal of the position and a vector of the step. The
# paper uses sines and cosines for both. This page learns the vectors of steps, as the authors' code does by default.


def signal(positions, dim):
    """positions [time] -> [time, dim]: sines of dim / 2 frequencies from 1 down to 1 / 10,000, and their cosines."""
    frequencies = 10000 ** (-torch.arange(dim // 2) / (dim // 2 - 1))
    angles = positions[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


# ## The layer
#
# The layer is a plain one: causal softmax attention, which reads the keys and values of earlier tokens *at the same
# step*, and a feed-forward network. Without halting, $N$ steps are exactly $N$ softmax layers that share their weights.
#
# The norm stands before each sublayer, as in the authors' code, so that the shortcut is free of norms over all steps.
# (The paper normalises after each sublayer.) The signals are added in every step, so the vectors grow, and one norm
# follows the last step.


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, cache=None):
        """x [batch, time, dim] behind the tokens of the cache (k, v) -> outputs, and the cache."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x)))), (k, v)


# ## Halting
#
# `halted` is the sum of a token's probabilities so far. A step of a running token gets the weight $p$. The step that
# lifts the sum above $1 - \epsilon$ is the last, and its weight is the remainder $1 - \mathrm{halted}$, so that the
# weights of a token add up to 1.
#
# Graves' output is the weighted sum of all states (`accumulated`). The authors' code interpolates instead, $o
# \leftarrow u y + (1 - u) o$: later steps count more, and this is the default here. A token that still runs when the
# steps end gets no remainder.
#
# The number of steps has no gradient. So the loss gets a ponder cost: the number of steps (a constant) plus the
# remainder, which has a gradient. Lowering the remainder raises the probabilities of earlier steps, and tokens halt
# sooner.


def halt(x, y, out, halted, running, w, b, accumulated, threshold=0.99):
    """Decide after a step from x to y [batch, time, dim]. running [batch, time] -> the next three, and the cost."""
    p = (x @ w + b).sigmoid()
    still = running & (halted + p <= threshold)
    remainder = torch.where(running & ~still, 1 - halted, 0)
    u = torch.where(still, p, remainder)[..., None]
    out = out + u * y if accumulated else u * y + (1 - u) * out
    return out, halted + u[..., 0], still, running + remainder


# ## The model
#
# A halted token keeps its vector, and later steps copy it. Tokens that still run must be able to read it, so each later
# step still makes the key and the value of a halted token. (In the authors' code its vector changes on, and only its
# output is frozen. Then no work is saved.)
#
# The decision of a token reads its own vector, which depends on earlier tokens alone. So the model is causal, and
# cached steps equal the whole sequence. Halting by the mean over the sequence, another form in the authors' code, would
# break this: later tokens would change how many steps an earlier token takes.
#
# The state is one cache of keys and values for *each step*. The weights are shared, the caches are not.


class Universal(nn.Module):
    def __init__(self, dim, num_heads, steps, vocab=256, accumulated=False):
        super().__init__()
        self.dim, self.steps, self.accumulated = dim, steps, accumulated
        self.embed, self.step_signal = nn.Embedding(vocab, dim), nn.Parameter(torch.randn(steps, dim) / dim**0.5)
        self.layer, self.norm = Layer(dim, num_heads), nn.LayerNorm(dim)
        self.w, self.b = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.tensor(-0.5))
        nn.init.normal_(self.embed.weight, std=dim**-0.5)

    def step(self, tokens, state=None):
        """tokens [batch, time] behind the tokens of the state -> logits [batch, time, vocab], and the next state: a
        cache for each step, and the ponder cost [batch] so far."""
        caches, cost = state or ([None] * self.steps, 0)
        start = 0 if state is None else caches[0][0].shape[2]
        place = signal(start + torch.arange(tokens.shape[1]), self.dim)
        x, after = self.embed(tokens) * self.dim**0.5, []
        out, halted, running = torch.zeros_like(x), torch.zeros(tokens.shape), torch.ones_like(tokens, dtype=torch.bool)
        for n in range(self.steps):
            entered = x + place + self.step_signal[n] * self.dim**0.5
            y, cache = self.layer(entered, caches[n])
            x = torch.where(running[..., None], y, x)
            out, halted, running, paid = halt(entered, x, out, halted, running, self.w, self.b, self.accumulated)
            after.append(cache)
            cost = cost + paid.sum(1)
        return self.norm(out) @ self.embed.weight.T, (after, cost)

    def forward(self, tokens):
        return self.step(tokens)[0]


# ## Costs, and when to take it
#
# A token that takes $n$ of $N$ steps costs $n$ layers, and in the other steps a key and a value. This page computes all
# steps for all tokens; the library leaves out the rest. Weights cost as much memory as one layer, the caches as much as
# $N$ layers: $2 N T d$ numbers for $T$ tokens of width $d$.
#
# The paper claims better generalisation to longer problems of copying, reversal and addition, an error below 1 % on
# bAbI, and 0.9 BLEU over a Transformer of equal weights in translation. Our result pages bear out a part.
# "ponder_copy": six fixed steps of one layer get 86 to 94 % of the tokens of a copy of 15 digits right, trained on 10
# at most, and a stack of as many weights 82 to 87 %; but with halting it is 60 to 66 %, because tokens stop after 2
# steps. "ponder" (reversal): tokens take 2.3 of 6 steps and encoding is 2.0 to 2.3 times as fast, but longer problems
# are not solved better than by a stack. "ponder_addition": digits with a carry do not take more steps than others.
#
# Take it when a problem repeats one operation, with a fixed number of steps first. Do not take it for plain text: a
# stack of different layers learns more in the same time. Answering token by token, halting took longer than it saved.

# --- proof ---
# The library's whole model with the same weights gives the same logits, gradients, streamed steps and ponder costs.


import proofs

import kinformer


def proof():
    names = {
        "input.embedding": "embed",
        "position.table": "step_signal",
        "stack.layers.0.mixer.projection.qkv": "layer.qkv",
        "stack.layers.0.mixer.out": "layer.out",
        "stack.layers.0.feed_forward.up": "layer.up",
        "stack.layers.0.feed_forward.down": "layer.down",
        "stack.layers.0.mixer_residual.norm": "layer.norm1",
        "stack.layers.0.feed_forward_residual.norm": "layer.norm2",
        "stack.halting.w": "w",
        "stack.halting.b": "b",
        "norm": "norm",
    }
    names = {f"inner.{there}": here for there, here in names.items()}
    tokens = torch.randint(256, (2, 30))
    for steps, output in ((3, "basic"), (6, "accumulated")):
        print(f"{steps} steps, output: {output}")
        page = Universal(32, 2, steps, accumulated=output == "accumulated")
        nn.init.normal_(page.w, std=0.5)
        settings = {"stack.steps": steps, "stack.halting.output": output}
        library = proofs.Whole(kinformer.build("universal", recipe="tiny", set=settings))
        proofs.compare(page, library, names, tokens, page.step)
        states = library(tokens, return_state=True)[1].layers
        proofs.equal("ponder costs", page.step(tokens)[1][1], sum(state.aux for state in states) / 0.01)


def train():
    return proofs.train(None, __file__, whole=lambda: Universal(32, 4, 6), length=64)


def draw(figure, model):
    """The ponder cost of every byte of a sentence, and the steps that follow from a constant probability p."""
    text = "every token halts when its probabilities add up to 1"
    bars, chance = figure.subplots(1, 2, width_ratios=[3, 1])
    state, costs = None, [0.0]
    with torch.no_grad():
        for token in text.encode():
            _, state = model.step(torch.tensor([[token]]), state)
            costs.append(state[1].item())
    cost = torch.tensor(costs).diff()
    bars.bar(range(len(text)), cost.floor(), label="steps")
    bars.bar(range(len(text)), cost.frac(), bottom=cost.floor(), label="remainder, the weight of the last step")
    bars.set(title="ponder cost of each byte after training", xticks=range(len(text)))
    bars.legend(fontsize="small")
    bars.set(xticklabels=list(text), ylim=(0, 4.5))
    bars.tick_params("x", length=0, labelsize="small")
    p = torch.linspace(0.08, 0.999, 400)
    chance.plot(p, (0.99 / p).floor() + 1)
    chance.set(title="steps, constant p", xlabel="p", ylim=(0, 13))


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
