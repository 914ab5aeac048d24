# # Image Transformer: local attention in one and two dimensions
#
# *Paper: Parmar et al., Image Transformer (2018), arXiv 1802.05751. Members: `image-transformer`. Measured: gpu,
# causal_members.*
#
# **Problem.** A model that draws an image value by value predicts each value from all earlier ones. A colour image of
# 32 x 32 pixels has 3,072 values, and full attention compares 4.7 million pairs. Convolutions are cheap, but their
# field of view is small and grows only with depth.
#
# **Idea.** Cut the values into blocks. All queries of a block share one set of keys: the block itself and what lies
# around it, its memory. So attention inside a block is one small dense product, and the field of view is as large as
# the memory:
#
# $$ y_i = \sum_{j \in M(i)} p_{ij} v_j, \quad
# p_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt{d})}{\sum_{m \in M(i)} \exp(q_i \cdot k_m / \sqrt{d})} $$

import math

import torch
from torch import nn

# ## One dimension: the block before
#
# The image is read row by row as one sequence, in blocks of $b$ values. A value sees the values of its block up to
# itself, and the whole block before:
#
# $$ M(i) = \{ j \le i : \lfloor i / b \rfloor - \lfloor j / b \rfloor \le 1 \} $$
#
# That gives $b + 1$ to $2 b$ keys. A sliding window would give every query the same number, but each query would need
# another slice of keys.


def seen_1d(i, j, block):
    """Query and key positions, broadcastable -> whether the query sees the key."""
    return (j <= i) & (i // block - j // block <= 1)


# ## Two dimensions: a rectangle with flanges
#
# A row of 32 colour pixels has 96 values, so a block of 256 values sees far to the left and only a few rows up. In two
# dimensions a block is a rectangle. The image is drawn block by block, and inside a block row by row. The memory is the
# rectangle with flanges: the rows above it, which reach farther to both sides, and the columns on its left.
#
# Nothing to the right of the block in its own rows has been drawn yet. The upper right flange has: all blocks of the
# rows of blocks above come first.


def cell(i, width, block):
    """Position in the order of drawing -> row and column; block (height, width) of a block."""
    number, inside = i // (block[0] * block[1]), i % (block[0] * block[1])
    top, left = number // (width // block[1]) * block[0], number % (width // block[1]) * block[1]
    return top + inside // block[1], left + inside % block[1]


def seen_2d(i, j, width, block, flange):
    """As `seen_1d`, with block and flange (height, width)."""
    (y, x), (key_y, key_x) = cell(i, width, block), cell(j, width, block)
    top, left = y // block[0] * block[0], x // block[1] * block[1]
    columns = (key_x >= left - flange[1]) & (key_x < left + block[1] + flange[1])
    above = (key_y >= top - flange[0]) & (key_y < top) & columns
    in_rows = (key_y >= top) & (key_y < top + block[0])
    beside = in_rows & (key_x >= left - flange[1]) & (key_x < left)
    own = in_rows & (key_x >= left) & (key_x < left + block[1]) & (j <= i)
    return above | beside | own


# ## The layer
#
# The rest is multi-head attention. The softmax normalises over the memory, so the weights of every value sum to 1, at
# the edge of the image too. With a block as large as the image, both patterns are exact causal softmax attention.
#
# Causality is a matter of order here. Both patterns allow only the query's cell and cells drawn before it. If an image
# were drawn row by row, the lower rows of the left flange would lie in the future. So the 2D pattern comes with its
# order of drawing.
#
# While drawing, keys and values of earlier cells are stored. In one dimension the last $2 b - 1$ are enough; in two,
# the last few rows of blocks. This page keeps the whole image.


class LocalAttention(nn.Module):
    def __init__(self, dim, num_heads, seen):
        """seen(i, j) -> bool, as `seen_1d`."""
        super().__init__()
        self.num_heads, self.seen = num_heads, seen
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def step(self, x, state=None):
        """x [batch, time, dim], cells after the cells of the state -> outputs of the same shape, and the next state."""
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        slots = k.shape[2]
        seen = self.seen(torch.arange(slots - time, slots)[:, None], torch.arange(slots))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, time, dim)), (k, v)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# | | keys of a query, at most | a 32 x 96 image of values |
# | --- | --- | --- |
# | full attention | $T$ | 3,072 |
# | 1D, block $b$ | $2 b$ | 512 with $b = 256$ |
# | 2D, block $h \times w$, flange $f \times g$ | $h w + f (w + 2 g) + h g$ | 1,024 with 8 x 16 and 8 x 32 |
#
# The cost of an image grows linearly with its number of values, and one more value costs its keys. Layers extend the
# field of view by a block each.
#
# Take it when images are drawn value by value, and neighbours decide. Do not take it for text, where a block begins at
# an arbitrary word: a sliding window treats all words alike.
#
# The paper reports 2.90 bits per dimension on CIFAR-10, and 3.77 on ImageNet at 32 x 32 where the best model before had
# 3.83. We have not repeated these. On our result page "gpu" a training step of 16 rows of 1,024 tokens takes 16.7 ms,
# and 12.9 ms with `gpt`, as lengths of 1,024 are still cheap. On "causal_members", with text, `image-transformer` has
# 2.113 bits per byte and `gpt` 2.071.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps, for both patterns. The
# page trains on images of disks.


import proofs
from torch.nn import functional as F

import kinformer


def proof():
    def check(seen, pattern):
        page = LocalAttention(32, 4, seen)
        library = kinformer.layer("image-transformer", 32, num_heads=4, pattern=pattern)
        names = {"inner.projection.qkv": "qkv", "inner.out": "out"}
        proofs.compare(page, library, names, torch.randn(2, 48, 32), page.step)

    for block in (5, 48):
        print(f"1D, block {block}")
        check(lambda i, j, block=block: seen_1d(i, j, block), {"kind": "image_1d", "block": block})
    for block, flange in (((2, 4), (2, 2)), ((3, 2), (1, 3)), ((6, 8), (0, 0))):
        print(f"2D, 6 x 8 cells, block {block}, flange {flange}")
        sizes = {"height": 6, "width": 8, "block_height": block[0], "block_width": block[1]}
        flanges = {"flange_height": flange[0], "flange_width": flange[1]}
        seen = lambda i, j, block=block, flange=flange: seen_2d(i, j, 8, block, flange)  # noqa: E731
        check(seen, {"kind": "image_2d"} | sizes | flanges)


SIZE, BLOCK, FLANGE = 12, (4, 4), (3, 2)
ORDER = [
    y * SIZE + x for y, x in zip(*(part.tolist() for part in cell(torch.arange(SIZE**2), SIZE, BLOCK)), strict=True)
]


def disks(count):
    """Return images [count, 144] of one disk each, in the order of drawing; values from 0 to 3."""
    y, x = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    centre, radius = 4 + 3 * torch.rand(count, 2, 1, 1), 3 + 2 * torch.rand(count, 1, 1)
    distance = ((y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2).sqrt()
    return (1.5 * (radius - distance)).clamp(0, 3).round().long().flatten(1)[:, ORDER]


def shifted(images):
    """Return the input of each cell: the value before it, and 255 for the first."""
    return F.pad(images, (1, 0), value=255)[:, :-1]


def train():
    torch.manual_seed(0)
    seen = lambda i, j: seen_2d(i, j, SIZE, BLOCK, FLANGE)  # noqa: E731
    model = proofs.Tiny(lambda: LocalAttention(64, 4, seen), 64, SIZE**2)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(120):
        images = disks(8)
        loss = F.cross_entropy(model(shifted(images)).flatten(0, 1), images.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / math.log(2))
    print(f"disks: {losses[0]:.2f} bits per cell at first, {losses[-1]:.2f} after {len(losses)} steps")
    return model


def draw(figure, model):
    """The cells that one query sees in one dimension and in two, and an image that the model continues twice."""
    panels = figure.subplots(1, 5)
    j, i = torch.arange(SIZE**2), 69
    place = torch.tensor(ORDER).argsort()
    for axes, title, seen, query in (
        (panels[0], "1D, block 24", seen_1d(torch.tensor(ORDER[i]), j, 24), ORDER[i]),
        (panels[1], "2D, block 4 x 4", seen_2d(torch.tensor(i), j, SIZE, BLOCK, FLANGE)[place], ORDER[i]),
    ):
        picture = seen.float()
        picture[query] = 2
        axes.imshow(picture.view(SIZE, SIZE))
        axes.set_title(title)
    image = disks(1)
    images = image.repeat(2, 1)
    with torch.no_grad():
        for number in range(4 * SIZE, SIZE**2):
            logits = model(shifted(images[:, : number + 1]))[:, -1]
            images[:, number] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    for axes, title, cells in zip(panels[2:], ("image", "continued", "and again"), (*image, *images), strict=True):
        axes.imshow(cells[place].view(SIZE, SIZE), vmin=0, vmax=3)
        axes.set_title(title)
    for axes in panels:
        axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
