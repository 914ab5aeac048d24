# # Losses at every layer: a deep model of characters
#
# *Paper: Al-Rfou et al., Character-Level Language Modeling with Deeper Self-Attention (2018), arXiv 1808.04444.
# Members: `deep-char`. Measured: quality.*
#
# **Problem.** A model of characters needs long contexts and many layers, and a stack of 64 layers hardly trains: the
# loss stands at the end, and the first layers hear little of it.
#
# **Idea.** Give every layer a loss. Each layer predicts the next character through a reader that exists in training
# only, the lower layers stop one after the other, and in the second half of training only the last layer is left:
#
# $$ L = L_n + \sum_{l < n, \; l > 2 n u} L_l, \quad u = \frac{\mathrm{step}}{\mathrm{steps}} $$
#
# The paper trains models of 12 and 64 layers.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The layer
#
# Attention is softmax attention. The division by $\sqrt{d}$ keeps scores near a standard deviation of 1, and the mask
# hides later characters: it alone makes the model causal. The page puts norms before sublayers, which keeps a free
# shortcut through the stack. (In the paper they stand behind.)


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def step(self, x, state=None):
        batch, time, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - time + 1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, dim))
        return x + self.down(F.relu(self.up(self.norm2(x)))), (k, v)


# ## Positions at every layer
#
# Positions added at the bottom alone may be lost in a deep stack. So every layer adds a learned vector of the position
# to its input. It enters the shortcut, and all later layers see it too. A model of 64 layers of width 512 and 512
# positions has 17 million of these numbers, and the texts end where the tables end.
#
# The state is the pair (k, v) of each layer, one row a character. Positions count on from the length of the state. The
# published evaluation did not use it: it moved a window of 512 by one character at a time, so that each prediction has
# the full context. Beyond the table's end a cache would not help, because every vector would change its position.


class Model(nn.Module):
    def __init__(self, vocab=256, dim=64, depth=6, num_heads=2, max_length=128):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.ParameterList([0.02 * torch.randn(max_length, dim) for _ in range(depth)])
        self.layers = nn.ModuleList([Layer(dim, num_heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def run(self, tokens, states=None):
        """Return the outputs of all layers [batch, time, dim], and their states."""
        states = states or [None] * len(self.layers)
        start = 0 if states[0] is None else states[0][0].shape[2]
        x, outputs, after = self.embed(tokens), [], []
        for layer, table, state in zip(self.layers, self.positions, states, strict=True):
            x, state = layer.step(x + table[start : start + tokens.shape[1]], state)
            outputs.append(x)
            after.append(state)
        return outputs, after

    def step(self, tokens, states=None):
        """tokens [batch, time] behind the states -> logits [batch, time, vocab], and the next states."""
        outputs, states = self.run(tokens, states)
        return self.head(self.norm(outputs[-1])), states

    def forward(self, tokens):
        return self.step(tokens)[0]


# ## The losses
#
# A reader is a norm and a product. Each layer also predicts the character after the next one, at half the weight. This
# second target exists in training only, even for the last layer. It asks for a plan of two characters and gives more
# gradient from each text.


class Reader(nn.Module):
    def __init__(self, dim, vocab, targets):
        super().__init__()
        self.targets, self.norm = targets, nn.LayerNorm(dim)
        self.output = nn.Linear(dim, targets * vocab, bias=False)

    def forward(self, x):
        return self.output(self.norm(x)).chunk(self.targets, -1)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Losses(nn.Module):
    def __init__(self, dim, vocab, depth):
        super().__init__()
        self.readers = nn.ModuleList([Reader(dim, vocab, 2 if i < depth - 1 else 1) for i in range(depth)])

    def forward(self, model, rows, progress):
        """rows of tokens [batch, time + 1], and how much of the training is done, from 0 to 1."""
        outputs, _ = model.run(rows[:, :-1])
        depth, following, second = len(outputs), rows[:, 1:], rows[:, 2:]
        loss = cross_entropy(model.head(model.norm(outputs[-1])), following)
        for number, (x, reader) in enumerate(zip(outputs, self.readers, strict=True), 1):
            if number == depth or number > 2 * depth * progress:
                *first, ahead = reader(x)
                loss = loss + sum(cross_entropy(logits, following) for logits in first)
                loss = loss + cross_entropy(ahead[:, :-1], second) / 2
        return loss


# ## Costs, and when to take it
#
# The losses cost one product with the vocabulary for each layer and target, which is little with 256 characters, and
# nothing after training: readers are thrown away. The rest is a plain decoder: $T^2$ comparisons a layer, $T$ for a
# generated character, $2 D$ stored numbers a character and layer of width $D$. With tables of zeros it is exact
# attention without positions.
#
# The paper reports 1.13 bits per character on text8 with 64 layers and 1.06 on enwik8. In its ablation on text8,
# without the losses of the layers 1.062 becomes 1.158, without learned positions 2.482, without the second target
# 1.068. Our result page "quality" has 2.048 bits per byte after four minutes, among the last (`gpt` 1.732): it reads
# bytes where the others read tokens, and the losses cost steps. Take it to study how deep stacks learn. Today norms
# before the sublayers train deep stacks without further losses, and rotary positions stand in every layer without
# tables.

# --- proof ---
# The library's model with the same weights gives the same logits, gradients and streamed steps; and its training
# objective has the page's loss at every stage of the training.


from pathlib import Path

import proofs

import kinformer
from kinformer.lab.tasks.next_token import DeepSupervision, TokenBatch


def proof():
    names = {"input.embedding": "embed", "norm": "norm", "head.output": "head"}
    for i in range(4):
        names |= {
            f"position.tables.{i}": f"positions.{i}",
            f"stack.layers.{i}.mixer.projection.qkv": f"layers.{i}.qkv",
            f"stack.layers.{i}.mixer.out": f"layers.{i}.out",
            f"stack.layers.{i}.mixer_residual.norm": f"layers.{i}.norm1",
            f"stack.layers.{i}.feed_forward_residual.norm": f"layers.{i}.norm2",
            f"stack.layers.{i}.feed_forward.up": f"layers.{i}.up",
            f"stack.layers.{i}.feed_forward.down": f"layers.{i}.down",
        }
    page = Model(dim=32, depth=4)
    library = kinformer.build("deep-char", recipe="tiny", set={"layers": 4})
    tokens = torch.randint(256, (2, 40))
    names = {f"inner.{there}": here for there, here in names.items()}
    proofs.compare(page, proofs.Whole(library), names, tokens, page.step)
    losses, objective = Losses(32, 256, 4), DeepSupervision.of(library)
    proofs.copy_weights(losses, objective, {"readers": "readers"})
    for progress in (0, 0.125, 0.3, 0.5):
        theirs = objective(library, TokenBatch(tokens), None, progress)[0].double()
        proofs.equal(f"loss at {progress}", losses(page, tokens, progress), theirs, 1e-6)  # which it sums in float32


def batch(count):
    """Return rows of 97 bytes of the page."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return torch.stack([text[i : i + 97] for i in torch.randint(len(text) - 97, (count,)).tolist()])


def train():
    """Train four layers on the page's text, by the schedule of the losses."""
    torch.manual_seed(0)
    model, losses, steps, bits = Model(depth=4), Losses(64, 256, 4), 120, []
    optimizer = torch.optim.AdamW([*model.parameters(), *losses.parameters()], lr=3e-3)
    for step in range(steps):
        rows = batch(8)
        optimizer.zero_grad()
        losses(model, rows, step / steps).backward()
        optimizer.step()
        if step in (0, steps - 1):
            with torch.no_grad():
                bits.append(cross_entropy(model(rows[:, :-1]), rows[:, 1:]).item() / math.log(2))
    print(f"this page as text: {bits[0]:.2f} bits per byte at first, {bits[1]:.2f} after {steps} steps")
    return model


def draw(figure, model):
    """Left: which of 64 layers have a loss, by progress. Right: gradients of 24 new layers with and without losses."""
    schedule, gradients = figure.subplots(1, 2)
    progress, number = torch.linspace(0, 1, 200), torch.arange(1, 65)[:, None]
    schedule.imshow(((number > 128 * progress) | (number == 64)).float(), aspect="auto", extent=(0, 1, 64.5, 0.5))
    schedule.set(title="layers with a loss (yellow)", xlabel="progress", ylabel="layer of 64")
    deep, losses, rows = Model(depth=24), Losses(64, 256, 24), batch(4)
    weights = [layer.down.weight for layer in deep.layers]
    for name, progress in (("losses at all layers", 0), ("at the last layer", 1)):
        found = torch.autograd.grad(losses(deep, rows, progress), weights)
        gradients.plot(range(1, 25), [each.norm().item() for each in found], marker=".", label=name)
    gradients.set(title="gradient of the weights", xlabel="layer of 24", yscale="log")
    gradients.legend()


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
