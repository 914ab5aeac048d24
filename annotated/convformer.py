# # ConvFormer: the layers of a Transformer, without attention
#
# *Paper: Yu, Si, Zhou, Luo, Zhou, Feng, Yan, Wang: MetaFormer Baselines for Vision (2022), arXiv 2210.13452. Members:
# `convformer`. Measured: distillation.*
#
# **Problem.** A Transformer for images differs from a convolutional network in many ways at once: patches, norms,
# residuals, a wide feed-forward, and attention. A comparison of the two does not tell how much attention itself
# contributes.
#
# **Idea.** Keep the layers of the Transformer, and replace attention alone by a simple mixer of tokens. ConvFormer
# takes a separable convolution: a fixed weight for each channel and each distance, in place of weights that depend on
# the content.
#
# $$ y_i = W_2 \sum_{\delta} c_{\delta} \odot \mathrm{relu}(W_1 x_{i + \delta})^2 $$
#
# Here $\delta$ runs over the 7 x 7 neighbours of patch $i$, and $c_{\delta}$ is one number for each channel.

import torch
from torch import nn
from torch.nn import functional as F

# ## Depthwise convolution
#
# A full convolution has a matrix for each distance: $49\, n^2$ weights for $n$ channels. A separable one splits this
# into a sum over distances, channel by channel, and products that mix channels, patch by patch. The depthwise part has
# $49\, n$ weights.
#
# The loop adds one shifted image for each distance. Beyond the edge there are zeros. The weight of a distance is the
# same at every place, so a shape is recognised wherever it stands; a ViT has to learn this.


def depthwise(x, weight):
    """x [batch, rows, columns, channels], weight [channels, side, side] with an odd side -> the shape of x."""
    rows, columns, side = *x.shape[1:3], weight.shape[-1]
    padded = F.pad(x, (0, 0, side // 2, side // 2, side // 2, side // 2))
    y = torch.zeros_like(x)
    for dy in range(side):
        for dx in range(side):
            y = y + weight[:, dy, dx] * padded[:, dy : dy + rows, dx : dx + columns]
    return y


# ## The same as attention
#
# Attention with weights that depend on the distance alone, and with as many heads as channels, is this convolution. The
# weights need neither be positive nor sum to 1, because they are learnt numbers and not a softmax: no normaliser is
# needed. A negative weight subtracts a neighbour, which finds edges; softmax attention cannot subtract.


def as_attention(x, weight):
    """The same function, as a matrix [query, key] for each channel."""
    batch, rows, columns, channels = x.shape
    y, x_ = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    half = weight.shape[-1] // 2
    dy, dx = y - y[:, None] + half, x_ - x_[:, None] + half
    near = (dy >= 0) & (dy <= 2 * half) & (dx >= 0) & (dx <= 2 * half)
    matrix = weight[:, dy.clamp(0, 2 * half), dx.clamp(0, 2 * half)] * near
    return torch.einsum("cqk,bkc->bqc", matrix, x.flatten(1, 2)).view(x.shape)


# ## The mixer
#
# The first product doubles the width, the second returns to it. Between them stands an activation. ReLU cuts negative
# numbers, and the square makes the function curved: products of inputs appear, which the fixed weights of the
# convolution cannot form. (The paper adds a learnt scale and shift and calls it StarReLU.)


class SeparableConvolution(nn.Module):
    def __init__(self, dim, side=7):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.weight = nn.Parameter(torch.randn(2 * dim, 1, side, side) / side)

    def forward(self, x, form=depthwise):
        """x [batch, rows, columns, dim] -> the same shape."""
        return self.down(form(self.up(x).relu().square(), self.weight[:, 0]))


# ## The layer, and the model
#
# This is the layer of a ViT, with another mixer. Patches, norms and residuals are the same. No positions are added, as
# convolutions know the neighbours of a patch, and zeros beyond the edge tell where the image ends. Classes are read
# from the mean of all patches.
#
# (The paper's models have four stages, as Swin: between stages patches merge and become wider. The library's member
# keeps one grid and one width, so it differs from its ViT in the mixer alone.)


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mixer, self.norm1, self.norm2 = SeparableConvolution(dim), nn.LayerNorm(dim, 1e-6), nn.LayerNorm(dim, 1e-6)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.down(self.up(self.norm2(x)).relu().square())


class ConvFormer(nn.Module):
    def __init__(self, dim, layers, patch, channels, classes):
        super().__init__()
        self.patch, self.project = patch, nn.Linear(channels * patch**2, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim, 1e-6), nn.Linear(dim, classes)

    def forward(self, images):
        """images [batch, channels, height, width] -> logits [batch, classes]."""
        grid = images.shape[2] // self.patch, images.shape[3] // self.patch
        x = self.project(F.unfold(images, self.patch, stride=self.patch).mT).unflatten(1, grid)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean((1, 2)))


# ## Costs, and when to take it
#
# | for each of $N$ patches of width $d$ | attention | separable convolution |
# | --- | --- | --- |
# | products that mix patches | $2 N d$ | $98\, d$ |
# | products that mix channels | $4 d^2$ | $4 d^2$ |
# | weights of the mixer | $4 d^2$ | $4 d^2 + 98\, d$ |
#
# So the cost grows linearly with the image, and below 49 patches the convolution is not cheaper. An image is read at
# once: nothing is causal and no state is stored. It never becomes softmax attention, because its weights do not depend
# on the content.
#
# The paper claims that ConvFormer outperforms strong convolutional networks such as ConvNeXt on ImageNet, and that
# convolutions below and attention above (CAFormer) are best, with 85.5 %. On our result page "distillation" ConvFormer
# is right in 91.7 % of small digits after training on a tenth of the labels, where ViT alone is right in 60.9 % and ViT
# with this teacher in 66.5 %. With few labels, the knowledge that neighbours belong together is worth more than
# attention.
#
# Take it as a baseline, to measure the gain of attention on images, or as a teacher for `deit`.

# --- proof ---
# The library's mixer, layer and model with the same weights give the same outputs and gradients, and both forms agree.


import math

import proofs

import kinformer


def proof():
    x = torch.randn(2, 5, 8, 16)
    mixer = SeparableConvolution(16, 3)
    proofs.equal("convolution as attention", mixer(x, as_attention), mixer(x))
    page, library = ConvFormer(32, 2, 4, 3, 10), kinformer.build("convformer", recipe="tiny")
    parts = {
        "mixer.up": "mixer.up",
        "mixer.down": "mixer.down",
        "mixer.depthwise.weight": "mixer.weight",
        "mixer_residual.norm": "norm1",
        "feed_forward_residual.norm": "norm2",
        "feed_forward.up": "up",
        "feed_forward.down": "down",
    }
    names = {f"stack.layers.{i}.{there}": f"layers.{i}.{here}" for i in range(2) for there, here in parts.items()}
    names |= {"input.projection": "project", "norm": "norm", "head.output": "head"}
    for size in ((32, 32), (24, 40)):
        print(f"images of {size[0]} x {size[1]} pixels")
        proofs.compare(page, library, names, torch.randn(2, 3, *size))


def train():
    torch.manual_seed(0)
    model, (images, labels) = ConvFormer(16, 2, 3, 1, 4), proofs.shapes(1600)

    def loss():
        rows = torch.randint(len(images), (16,))
        return F.cross_entropy(model(images[rows]), labels[rows])

    losses = proofs.fit(model, loss, 120, lr=3e-3)
    others, answers = proofs.shapes(400)
    with torch.no_grad():
        right = (model(others).argmax(-1) == answers).float().mean()
    print(
        f"shapes: {losses[0] / math.log(2):.2f} bits at first, {losses[-1] / math.log(2):.2f} after {len(losses)} steps"
    )
    print(f"{right:.0%} of {len(others)} new images are right")
    return model


def draw(figure, model):
    """Learnt filters, an image, and the channels that three of the filters make of it."""
    panels = figure.subplots(2, 4)
    image = proofs.shapes(2)[0][1:]
    mixer = model.layers[0].mixer
    with torch.no_grad():
        x = model.project(F.unfold(image, 3, stride=3).mT).unflatten(1, (8, 8))
        x = mixer.up(model.layers[0].norm1(x)).relu().square()
        y = depthwise(x, mixer.weight[:, 0])[0]
    panels[0, 0].imshow(image[0, 0], cmap="gray")
    panels[0, 0].set_title("image")
    panels[1, 0].imshow(x[0].mean(-1))
    panels[1, 0].set_title("mean before")
    for axes, channel in zip(panels[:, 1:].T, y.flatten(0, 1).std(0).topk(3).indices.tolist(), strict=True):
        weight = mixer.weight[channel, 0].detach()
        axes[0].imshow(weight, cmap="coolwarm", vmin=-weight.abs().max(), vmax=weight.abs().max())
        axes[0].set_title(f"filter {channel}")
        axes[1].imshow(y[..., channel])
        axes[1].set_title(f"channel {channel} after")
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
