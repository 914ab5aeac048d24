# # Swin: windows that shift, and patches that merge
#
# *Paper: Liu, Lin, Cao, Hu, Wei, Zhang, Lin, Guo: Swin Transformer: Hierarchical Vision Transformer using Shifted
# Windows (2021), arXiv 2103.14030; second version: Liu et al.: Swin Transformer V2 (2022), arXiv 2111.09883. Members:
# `swin`. Measured: equal_flops.*
#
# **Problem.** In a ViT every patch is compared with every other patch. Twice the image side means four times the
# patches and 16 times the scores.
#
# **Idea.** Compare patches within windows of $w$ x $w$ patches only. In every second layer the windows stand half a
# window further and connect patches that a border separated. Between stages four neighbouring patches become one, twice
# as wide, so a window covers more and more of the image.
#
# $$ y_i = \sum_{j \in W(i)} p_{ij} v_j, \quad
# p_{ij} = \mathrm{softmax}_j\, (q_i \cdot k_j / \sqrt{d} + B[\Delta y, \Delta x]) $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Windows
#
# The window of a patch is its place divided by the window's side, after the shift.


def window_of(rows, columns, window, shift):
    """Return the number of the window of each patch, [rows, columns]."""
    y, x = (torch.arange(rows) - shift) // window, (torch.arange(columns) - shift) // window
    return y[:, None] * (columns + 2) + x


def distances(rows, columns):  # how far patch i lies below and right of patch j
    y, x = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    return y[:, None] - y, x[:, None] - x


# ## First form: a mask over all patches
#
# $B$ is a learnt number for each head and each of the $(2 w - 1)^2$ distances within a window. It replaces vectors of
# positions.


def attention(q, k, v, bias, window, shift):
    """q, k, v [batch, rows, columns, heads, head_dim], bias [heads, 2 window - 1, 2 window - 1] -> the shape of v."""
    rows, columns = q.shape[1:3]
    number = window_of(rows, columns, window, shift).flatten()
    dy, dx = (d.clamp(1 - window, window - 1) + window - 1 for d in distances(rows, columns))
    q, k, flat = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) + bias[:, dy, dx]
    weights = scores.masked_fill(number[:, None] != number, -torch.inf).softmax(-1)
    return (weights @ flat).transpose(1, 2).reshape(v.shape)


# ## Second form: roll, cut, attend
#
# Shifted windows at the edges are smaller. So the image is rolled: what leaves at the top enters at the bottom. A
# window may then hold up to four parts that do not touch. Their window numbers differ, and a mask keeps them apart (the
# authors subtract 100 from such scores).


def cut(x, window):
    """x [batch, rows, columns, ...] -> [batch, windows, window * window, ...]."""
    x = x.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3)
    return x.flatten(1, 2).flatten(2, 3)


def attention_in_windows(q, k, v, bias, window, shift):
    batch, rows, columns, heads, head_dim = v.shape
    number = window_of(rows, columns, window, shift)[None]
    q, k, v, number = (cut(x.roll((-shift, -shift), (1, 2)), window) for x in (q, k, v, number))
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    dy, dx = (d + window - 1 for d in distances(window, window))
    apart = number[:, :, None, :, None] != number[:, :, None, None, :]
    y = (q @ k.transpose(-2, -1) + bias[:, dy, dx]).masked_fill(apart, -torch.inf).softmax(-1) @ v
    y = y.transpose(2, 3).view(batch, rows // window, columns // window, window, window, heads, head_dim)
    return y.transpose(2, 3).reshape(batch, rows, columns, heads, head_dim).roll((shift, shift), (1, 2))


# ## Scores and biases of both versions
#
# Large Swin models diverged, because a few scores grew and ruled the softmax. Version 2 bounds them: the score is the
# cosine of $q$ and $k$, divided by a learnt temperature of at least 0.01. A small network computes $B$, so a model can
# move to larger windows:
#
# $$ B = 16\, \mathrm{sigmoid}(\mathrm{MLP}(s(\Delta y), s(\Delta x))), \quad
# s(d) = \mathrm{sign}(d) \log_8 (1 + 8 |d| / (w - 1)) $$


class WindowAttention(nn.Module):
    def __init__(self, dim, num_heads, window, shifted, second=False):
        super().__init__()
        self.num_heads, self.window, self.shifted, self.second = num_heads, window, shifted, second
        self.q, self.v, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.k = nn.Linear(dim, dim, bias=not second)
        if second:
            self.heat = nn.Parameter(torch.full((num_heads, 1), math.log(10)))
            self.mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, num_heads, bias=False))
        else:
            self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, num_heads) * 0.02)

    def bias(self):
        side = 2 * self.window - 1
        if not self.second:
            return self.table.T.view(-1, side, side)
        d = torch.arange(1 - self.window, self.window).to(self.heat) / (self.window - 1)
        s = d.sign() * (1 + 8 * d.abs()).log() / math.log(8)
        return 16 * self.mlp(torch.cartesian_prod(s, s)).sigmoid().T.view(-1, side, side)

    def forward(self, x, form=attention):  # x [batch, rows, columns, dim] -> the same shape
        rows, columns = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -columns % self.window, 0, -rows % self.window))
        q, k, v = (part(x).unflatten(-1, (self.num_heads, -1)) for part in (self.q, self.k, self.v))
        if self.second:
            q, k = F.normalize(q, dim=-1) * self.heat.clamp(max=math.log(100)).exp(), F.normalize(k, dim=-1)
        else:
            q = q / math.sqrt(q.shape[-1])
        shift = self.window // 2 if self.shifted and min(rows, columns) > self.window else 0
        return self.out(form(q, k, v, self.bias(), self.window, shift).flatten(-2))[:, :rows, :columns]


# ## Merging
#
# A stage has layers of such attention and feed-forwards. Version 1 normalises the inputs of both, version 2 the
# outputs. Merging is a product of four neighbours with a matrix.


class Merge(nn.Module):
    def __init__(self, dim, second=False):
        super().__init__()
        self.reduce, self.second = nn.Linear(4 * dim, 2 * dim, bias=False), second
        self.norm = nn.LayerNorm(2 * dim if second else 4 * dim)

    def forward(self, x):
        four = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.norm(self.reduce(four)) if self.second else self.reduce(self.norm(four))


# ## Costs, and when to take it
#
# With $w = 7$ a patch has 49 scores a head, however large the image is. An image of 224 x 224 pixels in patches of 4
# has 153,664 scores a head instead of 9.8 million. No state is stored. A window as large as the image gives exact
# softmax attention with biases.
#
# The paper claims 83.5 % on ImageNet for the base model, ahead of DeiT. Our result page "equal_flops" compares the
# beginning of training (700 steps on CIFAR-10) at equal computation: ViT is right in 39.1 % of the images, Swin in 33.1
# %.
#
# Take it if images are large or every pixel matters; take `vit` if images are small.

# --- proof ---
# The library's models with the same weights give the same logits and gradients, in both versions and for grids whose
# sides are not multiples of the window, and both forms of the page agree.


import proofs

import kinformer


class Layer(nn.Module):
    def __init__(self, dim, num_heads, window, shifted, second=False):
        super().__init__()
        self.attention, self.second = WindowAttention(dim, num_heads, window, shifted, second), second
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        for f, norm in ((self.attention, self.norm1), (lambda x: self.down(F.gelu(self.up(x))), self.norm2)):
            x = x + (norm(f(x)) if self.second else f(norm(x)))
        return x


class Swin(nn.Module):
    """Two stages of two layers; patches of two pixels, and the mean of the last vectors."""

    def __init__(self, dim, num_heads, window, channels, classes, second=False):
        super().__init__()
        self.project, self.norm0, self.norm = nn.Linear(4 * channels, dim), nn.LayerNorm(dim), nn.LayerNorm(2 * dim)
        first = [Layer(dim, num_heads, window, shifted, second) for shifted in (False, True)]
        last = [Layer(2 * dim, 2 * num_heads, window, shifted, second) for shifted in (False, True)]
        self.layers, self.merge, self.head = (
            nn.ModuleList(first + last),
            Merge(dim, second),
            nn.Linear(2 * dim, classes),
        )

    def forward(self, images):
        rows, columns = images.shape[2] // 2, images.shape[3] // 2
        x = F.unfold(images, 2, stride=2).transpose(1, 2).unflatten(1, (rows, columns))
        x = self.norm0(self.project(x))
        for layer in (*self.layers[:2], self.merge, *self.layers[2:]):
            x = layer(x)
        return self.head(self.norm(x).mean((1, 2)))


PARTS = {
    "mixer.query": "attention.q",
    "mixer.key": "attention.k",
    "mixer.value": "attention.v",
    "mixer.out": "attention.out",
    "mixer_residual.norm": "norm1",
    "feed_forward_residual.norm": "norm2",
    "feed_forward.up": "up",
    "feed_forward.down": "down",
}


def proof():
    for recipe, second in (("tiny", False), ("tiny-v2", True)):
        page = Swin(16, 1, 4, 3, 10, second)
        library = kinformer.build("swin", recipe=recipe)
        names = {"input.projection": "project", "embedding_norm": "norm0", "norm": "norm", "head.output": "head"}
        names |= {"stack.merges.0.norm": "merge.norm", "stack.merges.0.reduction": "merge.reduce"}
        for i in range(4):
            biases = {"mixer.biases": "attention.mlp"} if second else {"mixer.table": "attention.table"}
            names |= {f"stack.layers.{i}.{there}": f"layers.{i}.{here}" for there, here in (PARTS | biases).items()}
            if second:
                heat = f"layers.{i}.attention.heat"
                names[f"stack.layers.{i}.mixer.heat"] = lambda weights, heat=heat: weights[heat][..., None]
        for size in ((16, 24), (20, 36)):
            print(f"{recipe}, images of {size[0]} x {size[1]} pixels")
            proofs.compare(page, library, names, torch.randn(2, 3, *size))
        mixer, x = page.layers[1].attention, torch.randn(2, 8, 12, 16)
        proofs.equal("windows cut and masked", mixer(x, attention_in_windows), mixer(x))


def train():
    torch.manual_seed(0)
    model, (images, labels) = Swin(24, 2, 4, 1, 4), proofs.shapes(1600, size=16)

    def loss():
        rows = torch.randint(len(images), (32,))
        return F.cross_entropy(model(images[rows]), labels[rows])

    losses = proofs.fit(model, loss, 100, lr=3e-3)
    print(f"shapes: {losses[0]:.2f} nats at first, {sum(losses[-10:]) / 10:.2f} after {len(losses)} steps")
    return model


def draw(figure, model):
    """The windows of two layers, what one patch has seen after each layer, and learnt biases by distance."""
    side, seen = 16, torch.zeros(256)
    upper, lower = figure.subplots(2, 4)
    seen[8 * side + 7] = 1
    for layer in range(4):
        number = window_of(side, side, 4, 2 * (layer % 2))
        if layer < 2:
            colour = (number // (side + 2) + number % (side + 2)) % 2
            upper[layer].imshow(colour, cmap="Greys", vmax=4)
            upper[layer].set_title("windows, shifted" if layer else "windows")
        seen = ((number.flatten()[:, None] == number.flatten()).float() @ seen > 0).float()
        lower[layer].imshow(seen.view(side, side))
        lower[layer].set_title(f"reach after layer {layer + 1}")
    for head in range(2):
        bias = model.layers[1].attention.bias()[head].detach()
        upper[2 + head].imshow(bias, extent=(-3.5, 3.5, 3.5, -3.5))
        upper[2 + head].set_title(f"biases, head {head}")
    for axes in (*upper[:2], *lower):
        axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
