# # Fast weights: the delta rule
#
# *Paper: Schlag, Irie, Schmidhuber: Linear Transformers Are Secretly Fast Weight Programmers (2021), arXiv 2102.11174.
# Members: `fast-weights`. Measured: capacity, mqar, stream.*
#
# **Problem.** Linear attention adds every value to one matrix, $S_t = S_{t-1} + \phi(k_t) v_t^\top$. When a key comes
# again with a new value, a query reads the sum of the old and the new value. When there are more keys than features,
# all keys disturb each other.
#
# **Idea.** Treat the matrix as a small network whose weights are written by the tokens. First read the value that $S$
# holds for the key, then write the difference to the new value. A learned strength $\beta_t$ between 0 and 1 says how
# much of the difference is written. This is one step of gradient descent on $|v_t - S^\top \phi(k_t)|^2 / 2$:
#
# $$ S_t = S_{t-1} + \beta_t\, \phi(k_t) (v_t - S_{t-1}^\top \phi(k_t))^\top, \quad y_t = S_t^\top \phi(q_t) $$

import math

import torch
from torch import nn

# ## The features
#
# Orthogonal keys do not disturb each other, and $n$ features have $n$ orthogonal directions. The paper therefore maps a
# key to more features, without weights and without randomness (DPFP, equation 37): products of pairs of the entries of
# $r = \mathrm{relu}([x, -x])$. Most products are 0, so many keys are orthogonal. `nu` shifts give $2 d \nu$ features.
#
# The features are divided by their sum. The correction needs this: with $\beta = 1$ it multiplies the part of $S$ along
# $\phi(k)$ by $1 - |\phi(k)|^2$, which must not leave the interval from -1 to 1. The sum normalisation gives $|\phi(k)|
# \leq 1$. The denominator of linear attention is not used: it belongs to a sum of all keys, but the delta rule removes
# old values.


def phi(x, nu, eps=1e-5):
    """x [..., head_dim] -> features [..., 2 * head_dim * nu] that sum to 1."""
    r = torch.cat([x, -x], -1).relu()
    features = torch.cat([r * r.roll(-shift, -1) for shift in range(1, nu + 1)], -1)
    return features / (features.sum(-1, keepdim=True) + eps)


# ## First form: a state
#
# The state is the matrix $S$. A token reads it, corrects it, and reads it again. No other number is stored.


def recurrent(q, k, v, beta, S):
    """q, k [batch, heads, time, features], v [batch, heads, time, head_dim], beta [batch, heads, time], S [batch,
    heads, features, head_dim] -> outputs in the shape of v, and the last S."""
    outputs = []
    for t in range(q.shape[2]):
        key, query = k[:, :, t, :, None], q[:, :, t, None, :]
        old = (S * key).sum(-2)
        correction = beta[:, :, t, None] * (v[:, :, t] - old)
        S = S + key * correction[..., None, :]
        outputs.append((query @ S)[..., 0, :])
    return torch.stack(outputs, 2), S


# ## Second form: all corrections from one system of equations
#
# $S_t$ is a sum of keys times corrections, $S_t = S_0 + \sum_{j \leq t} \phi(k_j) u_j^\top$. A correction depends on
# all earlier corrections, but only linearly:
#
# $$ u_t = \beta_t \left(v_t - S_0^\top \phi(k_t) - \sum_{j < t} (\phi(k_j) \cdot \phi(k_t))\, u_j \right) $$
#
# This is a triangular system. Its solution costs $T^2$ products for a sequence without a loop. Then the outputs are
# linear attention whose values are the corrections. Cut into chunks, as on the page `linear_transformer`, it is the
# fast form for training (Yang et al. 2024, arXiv 2406.06484).


def parallel(q, k, v, beta, S):
    """The same function of the same tensors."""
    beta = beta[..., None]
    system = torch.eye(k.shape[2]) + (beta * k @ k.transpose(-2, -1)).tril(-1)
    u = torch.linalg.solve_triangular(system, beta * (v - k @ S), upper=False)
    return q @ S + (q @ k.transpose(-2, -1)).tril() @ u, S + k.transpose(-2, -1) @ u


# ## The layer
#
# One projection gives queries, keys, values and strengths. The authors' code divides outputs by $\sqrt{d}$, as
# attention divides scores.


class FastWeights(nn.Module):
    def __init__(self, dim, num_heads, nu=1):
        super().__init__()
        self.num_heads, self.head_dim, self.nu = num_heads, dim // num_heads, nu
        self.qkvb = nn.Linear(dim, num_heads * (3 * self.head_dim + 1), bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def project(self, x):
        """Return the features of queries and keys, values, and strengths."""
        heads = self.qkvb(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v, beta = heads.split([self.head_dim] * 3 + [1], -1)
        return phi(q, self.nu), phi(k, self.nu), v, beta[..., 0].sigmoid()

    def step(self, x, state=None, form=recurrent):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        if state is None:
            state = x.new_zeros(len(x), self.num_heads, 2 * self.head_dim * self.nu, self.head_dim)
        y, state = form(*self.project(x), state)
        return self.out(y.transpose(1, 2).flatten(2) / math.sqrt(self.head_dim)), state

    def forward(self, x):
        return self.step(x, form=parallel)[0]


# ## Costs, and when to take it
#
# A head of 64 with $\nu = 1$ stores $128 \times 64 = 8{,}192$ numbers at any length; softmax attention stores as many
# after 64 tokens. A token reads the matrix twice and writes it once. A mask is not needed for causality: $S_t$ holds
# tokens up to $t$ only. With $\beta_t = 1$ and orthogonal keys the rule is a dictionary: a new value replaces the old
# value of its key exactly. Without the correction it is linear attention; it reaches softmax attention in no limit.
#
# The paper claims that a sum of $n$ features stores about $n$ pairs and that the delta rule overwrites. Our result page
# "capacity" measures 40 pairs for elu + 1 of 64 features, and 80, 160 and 200 pairs for DPFP with 128, 256 and 384
# features. When keys are written again, the sum keeps a loss of 0.27 and more at any size, and the delta rule replaces
# them. "mqar" measures recall in text: 93 and 95 % with two seeds after 2,000 steps, 13 % with a third, where Gated
# DeltaNet, whose keys pass a short convolution, has 99 % after 700. After a million tokens in float32 the outputs are
# off by 1.2e-6 ("stream").
#
# Take it where facts change and the state must stay small. For language, `gated-deltanet` adds a decay to the same rule
# and learns faster.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    for nu in (1, 3):
        print(f"nu = {nu}")
        page = FastWeights(32, 4, nu)
        library = kinformer.layer("fast-weights", 32, num_heads=4, set={"feature_map.inner.nu": nu})
        proofs.compare(page, library, {"inner.qkv": "qkvb", "inner.out": "out"}, torch.randn(2, 30, 32), page.step)


def train():
    return proofs.train(lambda: FastWeights(64, 4), __file__)


def draw(figure, model):
    """The strengths that trained heads choose, and how well random pairs of a key and a value are read back."""
    text = "a key comes again; its value is new"
    x = model.embed(torch.tensor(list(text.encode()))[None])
    beta = model.layers[0].project(model.norms[0](x))[3][0].detach()
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    image = left.imshow(beta, vmin=0, vmax=1, aspect="auto")
    left.set(title="strength of writing", ylabel="head", xticks=range(len(text)), xticklabels=text, yticks=range(4))
    figure.colorbar(image, ax=left)
    keys, values = phi(torch.randn(1, 1, 64, 16), 1), torch.randn(1, 1, 128, 16)
    keys = keys / keys.norm(dim=-1, keepdim=True)
    counts = range(1, 41, 3)
    for writes, line in ((1, "-"), (2, "--")):
        errors = {"sum": [], "delta rule": []}
        for count in counts:
            k, v = keys[:, :, :count].repeat(1, 1, writes, 1), values[:, :, : writes * count]
            delta = parallel(k, k, v, torch.ones(k.shape[:3]), torch.zeros(1, 1, 32, 16))[1]
            for name, S in (("sum", k.transpose(-2, -1) @ v), ("delta rule", delta)):
                wanted = v[:, :, -count:]
                errors[name].append(((k[:, :, -count:] @ S - wanted).norm() / wanted.norm()).item())
        for color, (name, values_of) in zip(("tab:blue", "tab:orange"), errors.items()):
            right.plot(counts, values_of, line, color=color, label=f"{name}, written {('once', 'twice')[writes - 1]}")
    right.set(title="error of reading back", xlabel="keys, 32 features", ylim=(0, 3))
    right.legend(fontsize="x-small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
