# # HIPT: a pyramid of Transformers for very large images
#
# *Paper: Chen, Chen, Li, Chen, Trister, Krishnan, Mahmood: Scaling Vision Transformers to Gigapixel Images via
# Hierarchical Self-Supervised Learning (2022), arXiv 2206.02647. Members: `hipt`. Measured: pyramid.*
#
# **Problem.** A slide of tissue under the microscope has 100,000 x 100,000 pixels. In patches of 16 pixels these are 39
# million tokens, too many for attention and even for storage. And the only label belongs to the whole slide.
#
# **Idea.** Read the image as a book: letters form words, words form sentences. A ViT reads the patches of 16 pixels of
# each tile of 256 pixels and returns one vector. A second Transformer reads the 16 x 16 vectors of the tiles of each
# region of 4,096 pixels and returns one vector. A third reads the vectors of the regions and classifies the slide. With
# $f_l$ for a Transformer that returns its class token:
#
# $$ t = f_1(\mathrm{patches\ of\ a\ tile}), \quad r = f_2(\mathrm{vectors}\ t\ \mathrm{of\ a\ region}), \quad
# y = f_3(\mathrm{vectors}\ r\ \mathrm{of\ the\ slide}) $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## One Transformer for all levels
#
# A level gets vectors in a grid, adds a class token and learnt positions, and applies layers without a mask. The lowest
# two levels normalise the inputs of their parts (pre-norm, as ViT), the highest the outputs (post-norm, as the original
# Transformer). The $1 / \sqrt{d}$ keeps scores near a standard deviation of 1.


class Layer(nn.Module):
    def __init__(self, dim, num_heads, pre_norm=True):
        super().__init__()
        self.num_heads, self.pre_norm, eps = num_heads, pre_norm, 1e-6 if pre_norm else 1e-5
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attention(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        if self.pre_norm:
            x = x + self.attention(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.relu(self.up(x))))


class Level(nn.Module):
    """x [batch, places, width] -> the class token's last vector [batch, dim]."""

    def __init__(self, width, dim, num_heads, layers, places, enter):
        super().__init__()
        self.project, self.enter = nn.Linear(width, dim), enter
        self.token, self.positions = (
            nn.Parameter(torch.zeros(1, dim)),
            nn.Parameter(torch.randn(places + 1, dim) * 0.02),
        )
        self.layers, self.norm = nn.ModuleList([Layer(dim, num_heads) for _ in range(layers)]), nn.LayerNorm(dim, 1e-6)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.enter(self.project(x))], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, 0]


# ## Gated pooling
#
# The highest level works without a class token, because a slide has few regions, and any number. Its vector is a mean
# with learnt weights, which also show where the evidence lies. A softmax makes the weights sum to 1, so the vector does
# not grow with the number of regions:
#
# $$ z = \sum_i a_i h_i, \quad a = \mathrm{softmax}_i\, (w \cdot (\tanh(V h_i) \odot \mathrm{sigmoid}(U h_i))) $$
#
# A tanh is nearly linear around 0; the sigmoid beside it lets a weight depend on products of features.


class Slide(nn.Module):
    """x [batch, regions, width] -> logits [batch, classes]."""

    def __init__(self, width, dim, num_heads, layers, classes):
        super().__init__()
        self.project = nn.Linear(width, dim)
        self.layers = nn.ModuleList([Layer(dim, num_heads, pre_norm=False) for _ in range(layers)])
        self.content, self.gate, self.score = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.dense, self.output = nn.Linear(dim, dim), nn.Linear(dim, classes)

    def weigh(self, x):
        x = self.project(x).relu()
        for layer in self.layers:
            x = layer(x)
        return x, self.score(self.content(x).tanh() * self.gate(x).sigmoid()).softmax(1)

    def forward(self, x):
        x, weights = self.weigh(x)
        return self.output(self.dense((weights * x).sum(1)).relu())


# ## The pyramid
#
# The loops read each tile alone, then each region alone. So a slide can be read tile by tile, and only one vector of
# each is kept: 384 numbers for the 196,608 of a tile of colour pixels.
#
# The two lower levels learn without labels (by self-distillation, DINO, with views cut from the grid of vectors on the
# second level) and are then frozen. The few labels train the highest level alone. Freezing belongs to the method: the
# vectors of all tiles are computed once and stored.


class HIPT(nn.Module):
    def __init__(self, tile, region, slide, sides):
        super().__init__()
        self.tile, self.region, self.slide, self.sides = tile, region, slide, sides

    def regions(self, image):
        """image [channels, height, width] -> the vectors of its regions [regions, dim], row by row."""
        patch, tile, region = self.sides
        vectors = []
        for y in range(0, image.shape[1], region):
            for x in range(0, image.shape[2], region):
                tiles = []
                for b in range(y, y + region, tile):
                    for a in range(x, x + region, tile):
                        pixels = image[None, :, b : b + tile, a : a + tile]
                        tiles.append(self.tile(F.unfold(pixels, patch, stride=patch).transpose(1, 2)))
                vectors.append(self.region(torch.stack(tiles, 1)))
        return torch.cat(vectors)

    def forward(self, images):
        """images [batch, channels, height, width] -> logits [batch, classes]."""
        return self.slide(torch.stack([self.regions(image) for image in images]))


# ## Costs, and when to take it
#
# A region of 4,096 x 4,096 pixels has 65,536 patches: 4.3 billion scores a head for one encoder, and 16.9 million for
# 256 tiles of 257 tokens. The region itself adds 66,049. Attention is exact within each tile, within each region and
# among regions, but a patch never sees a patch of another tile: only vectors of tiles meet. An image of a single tile
# makes it a ViT. Nothing is causal, and no state is stored beside the vectors of tiles.
#
# The paper claims better subtyping than attention pooling of tiles for three kinds of cancer, most of all with a
# quarter of the labels. On our result page "pyramid", images of 256 digits belong to one of four classes by the
# frequent digit of one region (chance is 25 %). After 64 labels the frozen pyramid is right in 57.5 %, a logistic
# regression of the mean of the same vectors in 29.1 %; after 256 labels in 61.6 and 43.8 %. If all levels learn from 64
# labels, 43.2 % are right where the frozen pyramid has 67.2 % (learning rate 3e-4, one seed).
#
# Take it if images are too large for one encoder and labels belong to whole images. Do not take it if an image fits
# into one encoder.

# --- proof ---
# The library's model with the same weights gives the same logits and gradients, and the same vectors of regions.


import proofs

import kinformer

LAYER = {
    "mixer.projection.qkv": "qkv",
    "mixer.out": "out",
    "mixer_residual.norm": "norm1",
    "feed_forward_residual.norm": "norm2",
    "feed_forward.up": "up",
    "feed_forward.down": "down",
}


def pyramid(channels, classes, widths=(16, 24, 32), sides=(4, 8, 16)):
    first, second, third = widths
    places = [(large // small) ** 2 for small, large in zip(sides, sides[1:], strict=False)]
    tile = Level(channels * sides[0] ** 2, first, 2, 1, places[0], lambda x: x)
    return HIPT(tile, Level(first, second, 2, 1, places[1], F.gelu), Slide(second, third, 2, 2, classes), sides)


def proof():
    page, library = pyramid(3, 10), kinformer.build("hipt", recipe="tiny")
    names = {}
    for there, here, count in (
        ("input.encoder.input.encoder.", "tile.", 1),
        ("input.encoder.", "region.", 1),
        ("", "slide.", 2),
    ):
        for i in range(count):
            names |= {f"{there}stack.layers.{i}.{a}": f"{here}layers.{i}.{b}" for a, b in LAYER.items()}
        entrance = "input." if here == "tile." else "input.patches."
        names[f"{there}{entrance}projection"] = f"{here}project"
        if here != "slide.":
            names |= {f"{there}{entrance}tokens": f"{here}token", f"{there}{entrance}positions": f"{here}positions"}
            names[f"{there}norm"] = f"{here}norm"
    for gate in ("content", "gate", "score"):
        names[f"head.gate.{gate}"] = f"slide.{gate}"
    names |= {"head.dense": "slide.dense", "head.output": "slide.output"}
    library.requires_grad_()  # the library's lower levels are frozen; here their gradients are compared too
    for size in ((32, 32), (16, 48)):
        print(f"images of {size[0]} x {size[1]} pixels")
        images = torch.randn(2, 3, *size)
        proofs.compare(page, library, names, images)
        theirs = library.input.features(images).flatten(2).transpose(1, 2)
        proofs.equal("vectors of regions", torch.stack([page.regions(image) for image in images]), theirs)


RING = 1


def slides(count):
    """Return tiles [count, 9 regions, 4 tiles, 16, 16] of a shape each, and labels: 1 if a region has rings alone."""
    kinds = torch.randint(4, (count, 9, 4))
    for i in range(0, count, 2):
        kinds[i, torch.randint(9, ())] = RING
    label = (kinds == RING).all(-1).any(-1).long()
    bank, _ = proofs.shapes(800, 16)
    return bank[4 * torch.randint(200, kinds.shape) + kinds, 0], label


def train():
    """Train the tiles on single shapes and freeze them; then train the levels above on their stored vectors."""
    torch.manual_seed(0)
    model, head = pyramid(1, 2, (24, 24, 24), (4, 16, 32)), nn.Linear(24, 4)
    tiles, kinds = proofs.shapes(1600, 16)

    def vectors(tiles):
        return model.tile(F.unfold(tiles.reshape(-1, 1, 16, 16), 4, stride=4).transpose(1, 2))

    def tile_loss():
        rows = torch.randint(len(tiles), (32,))
        return F.cross_entropy(head(vectors(tiles[rows])), kinds[rows])

    proofs.fit(nn.ModuleList([model.tile, head]), tile_loss, 250, lr=3e-3)
    (images, labels), (others, answers) = slides(600), slides(300)
    with torch.no_grad():
        stored, unseen = (vectors(x).view(*x.shape[:3], -1) for x in (images, others))

    def logits(stored):
        return model.slide(model.region(stored.flatten(0, 1)).view(len(stored), 9, -1))

    def loss():
        rows = torch.randint(len(stored), (32,))
        return F.cross_entropy(logits(stored[rows]), labels[rows])

    proofs.fit(nn.ModuleList([model.region, model.slide]), loss, 250)
    with torch.no_grad():
        right = (logits(unseen).argmax(-1) == answers).float().mean()
    print(f"is a region full of rings? {right:.0%} of {len(others)} new images are right")
    return model


def draw(figure, model):
    """Images with a region of rings, and the weights of regions in the pooling."""
    tiles, labels = slides(40)
    panels = figure.subplots(1, 4)
    for pair, number in zip((panels[:2], panels[2:]), labels.nonzero()[:2, 0].tolist(), strict=True):
        image = tiles[number].view(3, 3, 2, 2, 16, 16).permute(0, 2, 4, 1, 3, 5).reshape(96, 96)
        with torch.no_grad():
            weights = model.slide.weigh(model.regions(image[None])[None])[1]
        pair[0].imshow(image, cmap="gray")
        pair[0].set_title("3 x 3 regions")
        for place in (31.5, 63.5):
            pair[0].axhline(place, color="tab:orange")
            pair[0].axvline(place, color="tab:orange")
        pair[1].imshow(weights.view(3, 3), vmin=0)
        pair[1].set_title("weights of pooling")
    for axes in panels:
        axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
