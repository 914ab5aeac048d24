# # Gated convolution: a layer that reads three tokens
#
# *Paper: Amini et al. (Liquid AI), LFM2 Technical Report (2025), arXiv 2511.23404. Mixer: `gated_convolution`.
# Measured: since_2025.*
#
# **Problem.** On a phone every generated token must read the cache of every layer, and a cache of keys and values grows
# with the text. Linear attention replaces the cache by a matrix for each head, and many of its layers have a short
# convolution of queries, keys and values in addition (see the pages `gated_deltanet` and `mamba2`).
#
# **Idea.** Keep the short convolution and leave out the matrix. The authors search for the layers of a model that is
# good and fast on small machines. Most layers of the result are such convolutions, and a few are softmax attention.
# Three projections of a token give its value $v$, a gate $b$ before the convolution and a gate $c$ after it:
#
# $$ u_t = b_t \odot v_t, \quad z_t = \sum_{s=0}^{2} w_s \odot u_{t-s}, \quad y_t = W_o\, (c_t \odot z_t) $$
#
# A weight $w_s$ is a vector: every channel has its own three numbers. Tokens before the sequence count as zeros.

import torch
from torch import nn
from torch.nn import functional as F

# ## First form: a state
#
# The state is $u$ of the last two tokens. A new token needs these two and its own $u$, which then enters the state. The
# oldest $u$ leaves it.


def recurrent(u, taps, recent):
    """u [batch, time, dim], taps [width, dim], recent [batch, width - 1, dim] -> z in the shape of u, and the last
    width - 1 of u. taps[0] weighs the token itself."""
    outputs = []
    for token in u.split(1, 1):
        window = torch.cat([recent, token], 1)  # oldest first
        outputs.append((window * taps.flip(0)).sum(1, keepdim=True))
        recent = window[:, 1:]
    return torch.cat(outputs, 1), recent


# ## Second form: one convolution
#
# For a whole sequence this is a convolution over time, of each channel alone ("depthwise"). PyTorch's `conv1d` computes
# a correlation, which multiplies the last weight with the newest token, so the weights are turned round. The state
# stands on the left, where a convolution usually pads with zeros. Padding on both sides would let a token see its
# successor.


def parallel(u, taps, recent):
    """The same function of the same tensors."""
    u = torch.cat([recent, u], 1)
    z = F.conv1d(u.mT, taps.flip(0).T[:, None], groups=u.shape[-1]).mT
    return z, u[:, u.shape[1] - recent.shape[1] :]


# ## The layer
#
# Neither gate has an activation, so the layer is a polynomial of third degree in its tokens: $c$ times $b$ times $v$.
# A convolution alone is linear, and its weights are the same at every token. With $b$, a token decides whether its
# successors see it. With $c$, a token decides whether it looks back.
#
# Nothing is normalised: a sum over three tokens cannot grow with the length of the text. The norm before the layer
# keeps its inputs at one scale.


class GatedConvolution(nn.Module):
    def __init__(self, dim, width=3):
        super().__init__()
        self.project = nn.Linear(dim, 3 * dim, bias=False)
        self.taps = nn.Parameter(torch.empty(width, dim).uniform_(-(width**-0.5), width**-0.5))
        self.out = nn.Linear(dim, dim, bias=False)

    def step(self, x, state=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        b, c, v = self.project(x).chunk(3, -1)
        if state is None:
            state = x.new_zeros(len(x), len(self.taps) - 1, x.shape[-1])
        z, state = form(b * v, self.taps, state)
        return self.out(c * z), state

    def forward(self, x):
        return self.step(x, form=parallel)[0]


# ## Costs, and when to take it
#
# | one token of width $d$ after $t$ others | softmax attention | gated convolution |
# | --- | ---: | ---: |
# | products with weights | $4 d^2$ | $4 d^2$ |
# | products that mix tokens | $2 t d$ | $3 d$ |
# | numbers in the state | $2 t d$ | $2 d$ |
#
# So a layer stores as much as softmax attention stores of a single token. A stack of $n$ such layers sees $2 n$ tokens
# back and no further, whatever it learns. It never equals softmax attention. With $w_1 = w_2 = 0$ it is a gated
# feed-forward of each token. LFM2 of 1.2 billion weights therefore has 10 of these layers and 6 of softmax attention,
# which find distant tokens.
#
# The paper claims that prefill and decoding are up to twice as fast on CPUs as with models of similar size. We did not
# train such a model. Our result page "since_2025" has one layer of width 256: a state of 2 KiB and 0.2 milliseconds a
# token after 65,536 tokens, where softmax attention has 128 MiB and 8.8 milliseconds.
#
# Take it for most layers of a model that generates on a small machine, with attention or a matrix state in the others.
# Do not take it alone where a token needs anything beyond its neighbours.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps, and both forms agree.


import proofs

import kinformer


def proof():
    for width in (3, 5):
        print(f"width: {width}")
        page, library = GatedConvolution(32, width), kinformer.layer("gated_convolution", 32, width=width)
        names = {"inner.products": "project", "inner.out": "out"}
        names["inner.convolution.weight"] = lambda weights: weights["taps"][:, None]
        x = torch.randn(2, 30, 32)
        proofs.compare(page, library, names, x, page.step)
        ours, theirs = (
            torch.autograd.grad(layer(x).square().sum(), weight)[0].flatten()
            for layer, weight in ((page, page.taps), (library, library.inner.convolution.weight))
        )
        proofs.equal("gradient of the taps", ours, theirs)


def train():
    return proofs.train(lambda: GatedConvolution(64), __file__, positions=False)


def draw(figure, model):
    """The weights that the second layer has learnt, and how much a prediction depends on earlier bytes."""
    left, right = figure.subplots(1, 2)
    taps = model.layers[1].taps.detach()
    order = (taps[1:].abs().sum(0) - taps[0].abs()).argsort()
    limit = taps.abs().max()
    image = left.imshow(taps[:, order], aspect="auto", cmap="RdBu", vmin=-limit, vmax=limit)
    left.set(title="weights of the second layer", xlabel="channel, sorted", yticks=range(3))
    left.set_yticklabels(["token", "1 back", "2 back"])
    figure.colorbar(image, ax=left)
    text = torch.tensor(list(b"a convolution of three tokens, then another one of three"))[None]
    embedded = []
    hook = model.embed.register_forward_hook(lambda *call: embedded.append(call[2].requires_grad_()) or embedded[0])
    logits = model(text)
    hook.remove()
    reach = torch.zeros(8)
    for t in range(8, text.shape[1]):
        slope = torch.autograd.grad(logits[0, t].logsumexp(0), embedded[0], retain_graph=True)[0][0]
        reach += slope.norm(dim=-1)[t - 7 : t + 1].flip(0)
    right.bar(range(8), reach / reach[0])
    right.set(title="gradient by an earlier byte", xlabel="bytes back", ylabel="beside the byte itself")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
