# # ViT and DeiT: an image is a sequence of patches
#
# *Paper: Dosovitskiy, Beyer, Kolesnikov, Weissenborn, Zhai, Unterthiner, Dehghani, Minderer, Heigold, Gelly, Uszkoreit,
# Houlsby: An Image is Worth 16x16 Words (2020), arXiv 2010.11929; distillation: Touvron, Cord, Douze, Massa,
# Sablayrolles, Jégou: Training data-efficient image transformers (2020), arXiv 2012.12877. Members: `vit`, `deit`.
# Measured: distillation, equal_flops.*
#
# **Problem.** A convolution sees a few neighbouring pixels, so two distant parts of an image meet only after many
# layers. Attention between all pixels would connect them at once, but an image of 224 x 224 pixels has 50,176 pixels
# and 2.5 billion pairs.
#
# **Idea.** Cut the image into squares of $P$ x $P$ pixels. Each patch, flattened, times one matrix $E$ is a token, and
# a plain Transformer encoder does the rest. With $P = 16$ there are 196. One more learnt token stands in front, and its
# last vector is classified:
#
# $$ z_0 = [c;\, x_1 E;\, \ldots;\, x_N E] + E_{pos}, \quad z_l = \mathrm{Layer}_l(z_{l-1}), \quad
# \mathrm{logits} = W\, \mathrm{LN}(z_L)_0 $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Patches
#
# `unfold` returns the patches row by row. The product with $E$ equals a convolution whose stride is its kernel. No
# other part of the model knows which pixels are neighbours.


def cut(images, patch):
    """images [batch, channels, height, width] -> [batch, patches, channels * patch * patch]."""
    return F.unfold(images, patch, stride=patch).transpose(1, 2)


# ## Positions
#
# Attention does not see order: without positions, a shuffled image gives the same class. So every place has a learnt
# vector, which is added once. The table has one row a place; the model has to learn that the places form a grid.
#
# A model is often trained on small images and fine-tuned on large ones. The patches keep their size, so the table is
# interpolated over the larger grid. ViT's authors interpolate linearly from corner to corner, DeiT's by cubic splines.


def resized(table, old, new, tokens, cubic):
    """table [tokens + rows * columns, dim] for the grid `old` -> the same for the grid `new`."""
    grid = table[tokens:].T.reshape(1, -1, *old)
    grid = F.interpolate(grid, new, mode="bicubic" if cubic else "bilinear", align_corners=not cubic)
    return torch.cat([table[:tokens], grid.flatten(2)[0].T])


# ## The layer
#
# The encoder layer is a GPT-2 layer without the causal mask: every patch sees every patch. The division by $\sqrt{d}$
# keeps the scores of wide heads near a standard deviation of 1. The norms stand in front (pre-norm).


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def weights(self, x):
        """x [batch, time, dim] -> weights [batch, heads, query, key] and values [batch, heads, time, head_dim]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1), v

    def forward(self, x):
        weights, v = self.weights(x)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# ## The model, and a second token
#
# The class token begins as the same vector for all images, and its attention collects evidence for a class. DeiT adds a
# distillation token beside it, with another classifier. In training each has another target; afterwards the two logits
# are averaged.


class ViT(nn.Module):
    def __init__(self, dim, num_heads, layers, grid, patch, channels, classes, distilled=False):
        super().__init__()
        self.grid, self.patch, self.distilled, self.count = grid, patch, distilled, 1 + distilled
        self.project = nn.Linear(channels * patch**2, dim)
        self.tokens = nn.Parameter(torch.randn(self.count, dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(self.count + grid[0] * grid[1], dim) * 0.02)
        self.layers = nn.ModuleList([Layer(dim, num_heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.heads = nn.ModuleList([nn.Linear(dim, classes) for _ in range(self.count)])

    def embed(self, images):
        x = torch.cat([self.tokens.expand(len(images), -1, -1), self.project(cut(images, self.patch))], 1)
        grid = images.shape[2] // self.patch, images.shape[3] // self.patch
        return x + resized(self.positions, self.grid, grid, self.count, self.distilled)

    def forward(self, images):
        """images [batch, channels, height, width] -> [batch, classes], or [batch, 2, classes] while DeiT trains."""
        x = self.embed(images)
        for layer in self.layers:
            x = layer(x)
        logits = torch.stack([head(self.norm(x)[:, i]) for i, head in enumerate(self.heads)], 1)
        return logits if self.training and self.distilled else logits.mean(1)


# ## Distillation
#
# A convolutional network knows from the start that near pixels belong together and that places are alike. DeiT learns
# this from the predictions of one. The class token learns the label $y$. The distillation token learns the class that
# the teacher finds most probable for the same augmented image, as if it were a label (hard distillation):
#
# $$ L = \frac{1}{2} \mathrm{CE}(z_{class}, y) + \frac{1}{2} \mathrm{CE}(z_{dist}, \arg\max_c t_c) $$
#
# A random crop may show another thing than its label says; the teacher sees the crop. Soft distillation compares with
# all of the teacher's probabilities at a temperature $\tau$ instead:
#
# $$ L = (1 - \lambda)\, \mathrm{CE}(z_{class}, y) + \lambda \tau^2\, \mathrm{KL}(p\, ||\, q), \quad
# p = \mathrm{softmax}(t / \tau), \quad q = \mathrm{softmax}(z_{dist} / \tau) $$


def hard_loss(logits, labels, teacher):
    """logits [batch, 2, classes], labels [batch], teacher's logits [batch, classes]."""
    return (F.cross_entropy(logits[:, 0], labels) + F.cross_entropy(logits[:, 1], teacher.argmax(-1))) / 2


def soft_loss(logits, labels, teacher, share=0.1, heat=3.0):
    p, q = (teacher / heat).softmax(-1), (logits[:, 1] / heat).softmax(-1)
    divergence = (p * (p / q).log()).sum(-1).mean()
    return (1 - share) * F.cross_entropy(logits[:, 0], labels) + share * heat**2 * divergence


# ## Costs, and when to take it
#
# $N$ patches cost $N^2$ scores a head and layer. Half the patch side means four times the patches and 16 times the
# scores. The image is read at once, so nothing is causal, nothing is generated and no state is stored. Attention is
# exact softmax attention.
#
# The paper claims that with enough images (300 million) attention alone beats convolutions, and that with ImageNet
# alone it is behind them. DeiT claims 81.8 % on ImageNet without further images for the base size, and 83.4 % with a
# distillation token. Our result page "distillation" has a tenth of the labels of a set of 8 x 8 digits: ViT is right in
# 60.9 %, with hard distillation in 66.5 %, with soft distillation in 64.3 %, and the teacher, a ConvFormer, in 91.7 %.
# "equal_flops" compares the first 700 steps on CIFAR-10 at equal computation: ViT 39.1 %, Swin 33.1 %.
#
# Take `vit` if labels are many or a trained one is at hand; `deit` if a teacher exists and labels are few; `swin` if
# images are large.

# --- proof ---
# The library's models with the same weights give the same logits and gradients, for images of two sizes, and the same
# losses of distillation.


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


def proof():
    for member in ("vit", "deit"):
        page = ViT(32, 2, 2, (8, 8), 4, 3, 10, member == "deit")
        library = kinformer.build(member, recipe="tiny")
        names = {f"stack.layers.{i}.{there}": f"layers.{i}.{here}" for i in range(2) for there, here in LAYER.items()}
        names |= {f"input.{name}": name for name in ("tokens", "positions")} | {"input.projection": "project"}
        names |= {"norm": "norm", "head.output": "heads.0"}
        names |= {"head.distilled": "heads.1"} if member == "deit" else {}
        for size in (32, 40):
            print(f"{member}, images of {size} x {size} pixels")
            proofs.compare(page, library, names, torch.randn(2, 3, size, size))
    page.eval()
    library.eval()
    proofs.equal("mean of both heads", page(torch.ones(1, 3, 32, 32)), library(torch.ones(1, 3, 32, 32)))
    compare_losses()


class Fixed(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, images):
        return self.logits


def compare_losses():
    """Compare the losses of distillation; the library computes them in float32."""
    from kinformer.lab.tasks.options import VisionOptions
    from kinformer.lab.tasks.vision import Distillation, ImageBatch

    logits, teacher, labels = torch.randn(6, 2, 10), torch.randn(6, 10), torch.randint(10, (6,))
    for name, loss, share in (("hard", hard_loss, 0.5), ("soft", soft_loss, 0.1)):
        options = VisionOptions(teacher="a", distillation=name, distillation_weight=share)
        batch = ImageBatch(torch.zeros(6, 3, 8, 8), labels, torch.ones(6, 4, dtype=torch.bool))
        theirs = Distillation(Fixed(teacher), options)(Fixed(logits), batch, None, 0.0)[0]
        proofs.equal(f"{name} distillation", loss(logits, labels, teacher), theirs.double(), 1e-6)


def train():
    """Train a convolutional teacher, and a DeiT on its answers, on noisy shapes at random places."""
    torch.manual_seed(0)
    (images, labels), (others, answers) = proofs.shapes(300), proofs.shapes(400)
    convolutions = [nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
    teacher = nn.Sequential(*convolutions, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    student = ViT(32, 4, 2, (6, 6), 4, 1, 4, distilled=True)

    def batch():
        rows = torch.randint(len(images), (16,))
        return images[rows].roll(torch.randint(-3, 4, (2,)).tolist(), (2, 3)), labels[rows]

    def label_loss():
        x, y = batch()
        return F.cross_entropy(teacher(x), y)

    def loss():
        x, y = batch()
        return hard_loss(student(x), y, teacher(x).detach())

    proofs.fit(teacher, label_loss, 250)
    proofs.fit(student, loss, 250)
    for name, model in (("the convolutional teacher", teacher), ("DeiT", student)):
        with torch.no_grad():
            right = (model(others).argmax(-1) == answers).float().mean()
        print(f"shapes, {len(images)} labels: {name} is right in {right:.0%} of {len(others)} new images")
    return student


def draw(figure, model):
    """Images in patches, and the largest weights of the class token and the distillation token in the last layer."""
    images, kinds = proofs.shapes(4)
    panels = figure.subplots(3, 4)
    with torch.no_grad():
        weights = model.layers[1].weights(model.layers[0](model.embed(images)))[0].amax(1)
    for number in range(4):
        panels[0, number].imshow(images[number, 0], cmap="gray")
        panels[0, number].set_title(proofs.SHAPES[kinds[number]])
        for place in range(4, 24, 4):
            panels[0, number].axhline(place - 0.5, color="tab:orange", linewidth=0.7)
            panels[0, number].axvline(place - 0.5, color="tab:orange", linewidth=0.7)
        for token in range(2):
            panels[1 + token, number].imshow(weights[number, token, 2:].view(6, 6))
    for axes, name in zip(panels[:, 0], ("patches", "class token", "distillation"), strict=True):
        axes.set_ylabel(name)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
