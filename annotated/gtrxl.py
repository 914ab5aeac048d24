# # GTrXL: a Transformer that begins as a reflex
#
# *Paper: Parisotto, Song, Rae, Pascanu, Gulcehre, Jayakumar, Jaderberg, Kaufman, Clark, Noury, Botvinick, Heess,
# Hadsell: Stabilizing Transformers for Reinforcement Learning (2019), arXiv 1910.06764. Members: `gtrxl`. Measured:
# memory_control, memory_control_deep, causal_members.*
#
# **Problem.** An agent that learns by trial needs a memory, and the signal of its rewards is weak and noisy.
# Transformers diverge there: a deep stack must first learn to do nothing harmful before its memory can be of use.
#
# **Idea.** Start as a policy of the present observation, a reflex. The norm moves to the input of each sublayer, so
# that the input reaches the output unchanged, and a gate that begins almost closed replaces the sum:
#
# $$ x \leftarrow g(x,\; \mathrm{relu}(\mathrm{Attention}(\mathrm{LN}([M;\, x])))) $$
#
# $$ x \leftarrow g(x,\; \mathrm{relu}(\mathrm{MLP}(\mathrm{LN}(x)))) $$
#
# $M$ is Transformer-XL's memory of the segment before.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The gate
#
# The gate is a gated recurrent unit that runs over the depth instead of time. $x$ is its state, and the sublayer's
# output $y$ its input:
#
# $$ r = \sigma(W_r y + U_r x), \quad z = \sigma(W_z y + U_z x - b) $$
#
# $$ g(x, y) = (1 - z) \circ x + z \circ \tanh(W_h y + U_h (r \circ x)) $$
#
# With $b = 2$ and small weights, $z$ begins at $\sigma(-2) = 0.12$: a layer passes on 88 % of its input, and twelve
# layers with two gates each still 5 %. With $b = 0$ this share would be $2^{-24}$. $b$ is learned.


class Gate(nn.Module):
    def __init__(self, dim, bias=2.0):
        super().__init__()
        self.W = nn.Linear(dim, 3 * dim, bias=False)  # of y: r, z, h
        self.U = nn.Linear(dim, 2 * dim, bias=False)  # of x: r, z
        self.U_h = nn.Linear(dim, dim, bias=False)
        self.b = nn.Parameter(torch.full((dim,), bias))

    def forward(self, x, y):
        (y_r, y_z, y_h), (x_r, x_z) = self.W(y).chunk(3, -1), self.U(x).chunk(2, -1)
        r, z = (y_r + x_r).sigmoid(), (y_z + x_z - self.b).sigmoid()
        return (1 - z) * x + z * (y_h + self.U_h(r * x)).tanh()


# ## Attention with a memory
#
# Attention is Transformer-XL's (`transformer_xl.py` derives it): scores with a sinusoid $R_{i-j}$ of the distance and
# two learned vectors, over the segment so far and the memory, whose gradient is cut. The memory holds the layer's
# inputs before the norm; the norm is applied when they are read.


def attention(q, k, v, r, u, w):
    """q [batch, heads, time, head_dim], k, v [batch, heads, slots, head_dim], r [heads, slots, head_dim] by
    distance -> the shape of q."""
    distance = k.shape[2] - q.shape[2] + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    position = ((q + w) @ r.transpose(-2, -1)).gather(-1, distance.clamp(min=0).expand(*q.shape[:2], -1, -1))
    scores = ((q + u) @ k.transpose(-2, -1) + position) / math.sqrt(q.shape[-1])
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v


def sinusoids(slots, dim):
    angles = torch.arange(slots)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([angles.sin(), angles.cos()], -1)


# ## The layer
#
# The relu before each gate keeps the shortcut free of a second linear path. A segment holds the steps between two
# updates, and the memory the steps before the last update. Acting, one step at a time, and learning from whole segments
# are one method; both give the same outputs. Causality holds, as the memory is older than the segment and the mask
# hides later steps.


class Layer(nn.Module):
    def __init__(self, dim, num_heads, segment, memory, hidden_dim):
        super().__init__()
        self.num_heads, self.segment, self.memory = num_heads, segment, memory
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.position, self.out = (nn.Linear(dim, n * dim, bias=False) for n in (3, 1, 1))
        self.u, self.w = (nn.Parameter(0.02 * torch.randn(num_heads, dim // num_heads)) for _ in range(2))
        self.up, self.down = nn.Linear(dim, hidden_dim, bias=False), nn.Linear(hidden_dim, dim, bias=False)
        self.gate1, self.gate2 = Gate(dim), Gate(dim)

    def read(self, x, before):
        slots = self.norm1(torch.cat([before, x], 1))
        q, k, v = self.qkv(slots).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        r = self.position(sinusoids(slots.shape[1], x.shape[-1])).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        y = attention(q[:, :, before.shape[1] :], k, v, r, self.u[:, None], self.w[:, None])
        return self.out(y.transpose(1, 2).flatten(2))

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        memory, segment = state or (x[:, :0], x[:, :0])
        outputs, rest = [], x
        while rest.shape[1]:
            part, rest = rest.tensor_split([self.segment - segment.shape[1]], 1)
            outputs.append(self.read(part, torch.cat([memory, segment], 1)))
            segment = torch.cat([segment, part], 1)
            if segment.shape[1] == self.segment:
                memory = torch.cat([memory, segment], 1).detach()
                memory, segment = memory[:, max(0, memory.shape[1] - self.memory) :], segment[:, :0]
        x = self.gate1(x, F.relu(torch.cat(outputs, 1)))
        y = self.down(F.relu(self.up(self.norm2(x))))
        return self.gate2(x, F.relu(y)), (memory, segment)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# The two gates have $12\, \mathrm{dim}^2$ weights, as many as attention and feed-forward network of a plain layer
# together, and a token costs as many products more. The state is Transformer-XL's: memory and segment, at most 511
# inputs of a layer with 256 each. With open gates ($z = 1$) the old input is gone; with closed ones the layer is the
# identity. If the segment is as long as the episode, attention is exact softmax attention.
#
# The paper claims a mean score of 117.6 on DMLab-30, where an LSTM reaches 99.3 and Transformer-XL 5.0. Our result page
# "memory_control_deep" measures a maze whose sign must be remembered for ten steps, twelve layers and a high learning
# rate: GTrXL solves it with three seeds of three, the moved norms without gates with two, Transformer-XL with one, and
# gates that begin half open ($b = 0$) with none. With one layer all three members solve it, and Transformer-XL is the
# fastest ("memory_control"). On text the gates cost time without gain: 2.212 bits per byte in equal time, where `gpt`
# has 2.071 ("causal_members").
#
# Take it for an agent that must remember, in many layers, where training must be reliable. Do not take it for text.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    mixer = {"projection.qkv": "qkv", "position.projection": "position", "out": "out"}
    mixer |= {"position.biases.content": "u", "position.biases.position": "w"}
    names = {f"inner.mixer.{there}": here for there, here in mixer.items()}
    names |= {"inner.feed_forward.up": "up", "inner.feed_forward.down": "down"}
    for residual, number in (("mixer_residual", 1), ("feed_forward_residual", 2)):
        names[f"inner.{residual}.norm"] = f"norm{number}"
        for there, here in {"bias": "b", "of_x": "U", "of_y": "W", "of_reset": "U_h"}.items():
            names[f"inner.{residual}.{there}"] = f"gate{number}.{here}"
    for segment, memory in ((8, 16), (64, 64)):
        print(f"segments of {segment}, a memory of {memory}")
        page = Layer(32, 4, segment, memory, 64)
        settings = {"mixer.segment": segment, "mixer.memory": memory, "feed_forward.hidden_dim": 64}
        library = kinformer.layer("gtrxl", 32, num_heads=4, whole=True, set=settings)
        proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)


class Agent(nn.Module):
    """A policy that sees a sign in the first step and must turn by it in the last one."""

    def __init__(self, bias, layers=4, dim=32):
        super().__init__()
        self.see, self.turn = nn.Linear(3, dim), nn.Linear(dim, 2)
        self.layers = nn.ModuleList([Layer(dim, 2, 6, 12, 64) for _ in range(layers)])
        for layer in self.layers:
            nn.init.constant_(layer.gate1.b, bias)
            nn.init.constant_(layer.gate2.b, bias)

    def forward(self, x):
        x = self.see(x)
        for layer in self.layers:
            x = layer(x)
        return self.turn(x)


def learn(bias, steps=60):
    """Learn the maze by REINFORCE; returns the agent and the share of right turns in each step."""
    torch.manual_seed(0)
    agent, shares = Agent(bias), []
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    for _ in range(steps):
        sign = torch.randint(2, (64,))
        x = torch.zeros(64, 10, 3)
        x[torch.arange(64), 0, sign] = 1
        x[:, -1, 2] = 1
        choice = torch.distributions.Categorical(logits=agent(x)[:, -1])
        turn = choice.sample()
        reward = (turn == sign).float()
        loss = -(choice.log_prob(turn) * (reward - 0.5)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shares.append(reward.mean().item())
    return agent, shares


def train():
    agent, shares = learn(2.0)
    print(f"right turns: {shares[0]:.2f} at first, {sum(shares[-10:]) / 10:.2f} after {len(shares)} updates")
    return shares


def draw(figure, shares):
    """How much of the input reaches each depth, with gates that begin closed or half open, and an agent that learns."""
    left, right = figure.subplots(1, 2)
    torch.manual_seed(0)
    x = torch.randn(1, 20, 64)
    for bias in (2.0, 0.0):
        y, kept = x, [1.0]
        for _ in range(12):
            layer = Layer(64, 4, 32, 32, 128)
            nn.init.constant_(layer.gate1.b, bias)
            nn.init.constant_(layer.gate2.b, bias)
            y = layer(y).detach()
            kept.append(F.cosine_similarity(x.flatten(), y.flatten(), 0).item())
        left.plot(kept, marker=".", label=f"b = {bias:.0f}")
    left.set(title="likeness of output and input", xlabel="layers, untrained", ylabel="cosine", ylim=(0, 1.05))
    left.legend(fontsize="small")
    right.plot(range(9, len(shares)), torch.tensor(shares).unfold(0, 10, 1).mean(-1))
    right.set(title="a sign ten steps back, four layers", xlabel="updates", ylabel="right turns", ylim=(0.3, 1.05))


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
