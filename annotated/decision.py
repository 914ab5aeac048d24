# # Decision Transformer: acting as sequence modelling
#
# *Paper: Chen, Lu, Rajeswaran, Lee, Grover, Laskin, Abbeel, Srinivas, Mordatch: Decision Transformer: Reinforcement
# Learning via Sequence Modeling (2021), arXiv 2106.01345. Members: `decision`. Measured: returns, key_to_door.*
#
# **Problem.** An agent shall learn from recorded episodes, good and bad ones, without trying anything itself. A copy of
# the recorded actions is as bad as their mean. Methods that estimate values of actions learn one estimate from another,
# and errors grow for actions that were never recorded.
#
# **Idea.** Write an episode as a sequence, and put before each state the return that was still to come. A causal
# decoder learns to continue such sequences with actions. It then knows which actions come before a high return and
# which before a low one. To act well, ask for a high return:
#
# $$ R_1, s_1, a_1, R_2, s_2, a_2, \ldots \quad R_t = \sum_{u \ge t} r_u, \quad
# p(a_t\, |\, R_{\le t}, s_{\le t}, a_{<t}) $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Returns to go
#
# A return to go is the sum of the rewards from this step to the end of the episode. It is not discounted. It may look
# ahead, because it is an input that the user chooses when the agent acts.


def returns_to_go(rewards):
    """rewards [batch, steps] -> the same shape."""
    return rewards.flip(1).cumsum(1).flip(1)


# ## Three tokens a step
#
# Return, state and action each have a matrix, so every kind is told apart. All three get the learnt vector of their
# timestep: positions count steps of the environment, not tokens. A norm makes vectors of one size from numbers of any.


class Embedding(nn.Module):
    def __init__(self, dim, state_dim, action_dim, timesteps):
        super().__init__()
        self.returns, self.states, self.actions = (nn.Linear(n, dim) for n in (1, state_dim, action_dim))
        self.timesteps, self.norm = nn.Embedding(timesteps, dim), nn.LayerNorm(dim)

    def forward(self, returns, states, actions, start=0):
        """[batch, steps], [batch, steps, state_dim], [batch, steps, action_dim] -> [batch, 3 * steps, dim]."""
        tokens = torch.stack([self.returns(returns[..., None]), self.states(states), self.actions(actions)], 2)
        time = self.timesteps(torch.arange(start, start + returns.shape[1]))
        return self.norm(tokens + time[:, None]).flatten(1, 2)


# ## The layers
#
# This is a decoder as GPT-2's, with a ReLU. Attention is exact softmax attention to earlier tokens; $1 / \sqrt{d}$
# keeps the scores of wide heads near a standard deviation of 1. The keys and values of earlier tokens are the state.


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.norm1, self.norm2 = num_heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm2(x)).relu()), (k, v)


# ## The model
#
# The action is read at the token of the state: this token has seen $R_t$ and $s_t$, but not $a_t$, which stands behind
# it. A mask by steps instead of tokens would let the state see its own action, and the model would learn to copy it.
# Only actions are predicted; the authors found that predicting states and returns does not help.


class DecisionTransformer(nn.Module):
    def __init__(self, dim, num_heads, layers, state_dim, actions, timesteps):
        super().__init__()
        self.embedding = Embedding(dim, state_dim, actions, timesteps)
        self.layers = nn.ModuleList([Layer(dim, num_heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, actions)

    def run(self, x, state=None):
        """x [batch, time, dim] -> logits of an action behind every token, and the next state."""
        states = []
        for i, layer in enumerate(self.layers):
            x, after = layer.step(x, state and state[i])
            states.append(after)
        return self.head(self.norm(x)), states

    def forward(self, returns, states, actions):
        """Return the logits of the actions [batch, steps, actions]; `actions` are one-hot."""
        return self.run(self.embedding(returns, states, actions))[0][:, 1::3]


# ## Acting
#
# The agent asks for a return, looks at the state, draws an action, and gets a reward. The next return to go is the old
# one minus the reward: the rest to be earned. Each step adds three tokens to the state of the model. (The authors read
# the last $K = 20$ or 30 steps again for each action.)


@torch.no_grad()
def act(model, environment, target, steps):
    """`environment(state, action)` -> next states and rewards, from (None, None) the first states.

    Returns the rewards [batch, steps] and states [batch, steps, state_dim].
    """
    state, memory, rewards, states = environment(None, None)[0], None, [], []
    rest = torch.full((len(state), 1), float(target))
    for t in range(steps):
        blank = torch.zeros(len(state), 1, model.head.out_features)
        tokens = model.embedding(rest, state[:, None], blank, start=t)
        logits, memory = model.run(tokens[:, :2], memory)
        action = F.one_hot(torch.multinomial(logits[:, -1].softmax(-1), 1)[:, 0], blank.shape[2]).to(state)
        memory = model.run(model.embedding(rest, state[:, None], action[:, None], start=t)[:, 2:], memory)[1]
        states.append(state)
        state, reward = environment(state, action.argmax(-1))
        rewards.append(reward)
        rest = rest - reward[:, None]
    return torch.stack(rewards, 1), torch.stack(states, 1)


# ## Costs, and when to take it
#
# An episode of $n$ steps has $3 n$ tokens and $9 n^2$ scores a head. Acting stores two vectors a token and layer: with
# 4 layers of width 256, 1,000 steps are 6.1 million numbers, and a step compares three tokens with all earlier ones.
# Without returns, the model is behaviour cloning.
#
# The paper claims scores on Atari, on control tasks and on Key-to-Door as good as or better than methods with value
# estimates. On our result page "returns" an agent is asked for seven returns in CartPole and Pendulum: the mean returns
# follow the targets with a rank correlation of 0.96 to 1.0, in order, though not in value. On "key_to_door" it learns
# from 1,000 random walks. Only 3 % of the walks succeed, but the agent opens the door in 93 % of its episodes, and
# cloned behaviour in none.
#
# Take it to learn from recorded episodes. Do not take it where the agent can act while it learns, or where luck
# decides: it takes the return of a lucky episode for the result of its actions.

# --- proof ---
# The library's model with the same weights gives the same logits, gradients and streamed tokens.


import proofs

import kinformer


class Packed(nn.Module):
    """The page's model, called with the library's rows [batch, time, 6]: kind, timestep and four values a token."""

    def __init__(self):
        super().__init__()
        self.model = DecisionTransformer(32, 2, 2, 4, 2, 64)

    def step(self, rows, state=None):
        """Return the logits behind each token, and the state: all rows so far, and the model's."""
        before, memory = 0, None
        if state is not None:
            before, memory, rows = state[0].shape[1], state[1], torch.cat([state[0], rows], 1)
        steps = F.pad(rows, (0, 0, 0, -rows.shape[1] % 3)).unflatten(1, (-1, 3))
        x = self.model.embedding(steps[:, :, 0, 2], steps[:, :, 1, 2:], steps[:, :, 2, 2:4])
        logits, memory = self.model.run(x[:, before : rows.shape[1]], memory)
        return logits, (rows, memory)

    def forward(self, rows):
        return self.step(rows)[0]


def proof():
    page, library = Packed(), proofs.Whole(kinformer.build("decision", recipe="tiny"))
    names = {f"inner.input.{name}": f"model.embedding.{name}" for name in ("returns", "states", "actions", "norm")}
    names |= {"inner.input.timesteps": "model.embedding.timesteps"}
    names |= {"inner.norm": "model.norm", "inner.head.output": "model.head"}
    parts = {
        "mixer.projection.qkv": "qkv",
        "mixer.out": "out",
        "mixer_residual.norm": "norm1",
        "feed_forward_residual.norm": "norm2",
        "feed_forward.up": "up",
        "feed_forward.down": "down",
    }
    for i in range(2):
        names |= {f"inner.stack.layers.{i}.{a}": f"model.layers.{i}.{b}" for a, b in parts.items()}
    rows = torch.randn(2, 30, 6)
    rows[..., 0], rows[..., 1] = torch.arange(30) % 3, torch.arange(30) // 3
    proofs.compare(page, library, names, rows, page.step)
    steps = rows.unflatten(1, (10, 3))
    actions = page.model(steps[:, :, 0, 2], steps[:, :, 1, 2:], steps[:, :, 2, 2:4])
    proofs.equal("actions at the states", actions, library(rows)[:, 1::3])


STEPS = 16


def line(state, action):
    """A walk on a line from -4 to 4, with a reward of 1 for each step that ends to the right of 0."""
    if state is None:
        return torch.zeros(64, 1), None
    place = (4 * state + 2 * action[:, None] - 1).clamp(-4, 4)
    return place / 4, (place[:, 0] > 0).float()


def walks(count):
    """Return random episodes: returns to go [count, steps], states [count, steps, 1] and actions [count, steps]."""
    actions, state, states, rewards = torch.randint(2, (count, STEPS)), torch.zeros(count, 1), [], []
    for t in range(STEPS):
        states.append(state)
        state, reward = line(state, actions[:, t])
        rewards.append(reward)
    return returns_to_go(torch.stack(rewards, 1)), torch.stack(states, 1), actions


def train():
    torch.manual_seed(0)
    model, (returns, states, actions) = DecisionTransformer(32, 2, 2, 1, 2, STEPS), walks(2000)

    def loss():
        rows = torch.randint(len(returns), (64,))
        logits = model(returns[rows], states[rows], F.one_hot(actions[rows], 2).float())
        return F.cross_entropy(logits.flatten(0, 1), actions[rows].flatten())

    losses = proofs.fit(model, loss, 150, lr=3e-3)
    print(f"random walks: {losses[0]:.2f} nats an action at first, {losses[-1]:.2f} after {len(losses)} steps")
    for target in (0, 8, 16):
        print(f"asked for {target}, the agent gets {act(model, line, target, STEPS)[0].sum(1).mean():.1f}")
    return model


def draw(figure, model):
    """The returns of the recorded walks, the returns that the agent gets for those it is asked for, and its paths."""
    data, asked, paths = figure.subplots(1, 3)
    data.hist(walks(2000)[0][:, 0].numpy(), bins=[n - 0.5 for n in range(STEPS + 2)])
    data.set(title="random walks", xlabel="return", ylabel="episodes")
    targets = range(0, STEPS + 1, 2)
    got = torch.stack([act(model, line, target, STEPS)[0].sum(1) for target in targets])
    asked.plot([0, STEPS], [0, STEPS], color="gray", linewidth=0.7)
    asked.errorbar(targets, got.mean(1), got.std(1), fmt="o")
    asked.set(title="the agent", xlabel="return asked for", ylabel="return, mean and deviation")
    for target in (0, 8, 16):
        states = act(model, line, target, STEPS)[1]
        paths.plot(4 * states[:, :, 0].mean(0), label=f"asked for {target}")
    paths.set(title="mean of 64 paths", xlabel="step", ylabel="place", ylim=(-4, 7))
    paths.legend(fontsize="small", loc="upper left")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
