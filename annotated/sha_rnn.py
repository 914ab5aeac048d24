# # SHA-RNN: one head on a recurrent network
#
# *Paper: Merity: Single Headed Attention RNN: Stop Thinking With Your Head (2019), arXiv 1911.11423. Members:
# `sha-rnn`. Measured: causal_members, quality.*
#
# **Problem.** A Transformer layer has many heads, three projections for each, and needs positions, warm-up and much
# hardware. A recurrent network knows the order and the near past by itself, and only lacks the look far back. How
# little attention does it need?
#
# **Idea.** A stack of LSTMs, and in one layer a single head whose keys and values are the layer's normed inputs
# themselves, without projections. Only the query has a matrix:
#
# $$ y_i = h_i + \sum_{j \le i} p_{ij}\, (m_j \circ g_v), \quad
# p_{ij} = \mathrm{softmax}_j \frac{(q_i \circ g_q) \cdot (m_j \circ g_k)}{\sqrt{\mathrm{dim}}} $$
#
# $m$ and $h$ are two layer norms of the same input, and $g_q$, $g_k$, $g_v$ are learned vectors.

import math

import torch
from torch import nn

# ## Recurrence
#
# An LSTM keeps a cell $c$ of numbers that it fades by $f$ and feeds by $i$, so a gradient can pass many steps:
#
# $$ c_t = f_t \circ c_{t-1} + i_t \circ \tanh(a_t), \quad y_t = o_t \circ \tanh(c_t) $$
#
# Gates are sigmoids of the token and of the last output. The recurrence gives the order, so attention gets no
# positions. It also forces training to go token by token.


def lstm(x, state, w, u, b):
    """x [batch, time, dim], state (y, c) [batch, dim] each, w and u [4 dim, dim], b [4 dim] -> outputs, state."""
    y, c = state
    outputs = []
    for t in range(x.shape[1]):
        i, f, a, o = (x[:, t] @ w.T + y @ u.T + b).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * a.tanh()
        y = o.sigmoid() * c.tanh()
        outputs.append(y)
    return torch.stack(outputs, 1), (y, c)


# ## One head
#
# The gates of keys and values are vectors that no token changes. A key's gate can multiply the query instead, and a
# value's gate the sum, so $m$ alone is stored: one vector a token, where softmax attention stores two. Only the query
# is normed and projected; the division by $\sqrt{\mathrm{dim}}$ keeps the scores near 1, because norms give $q$ and $m$
# entries near 1.
#
# The value's gate is $\sigma(f) \circ \tanh(c)$, made of a trained vector by a linear map. It is a constant after
# training; the detour lets it learn faster. It reaches from -1 to 1, so a feature can be subtracted.


class Attention(nn.Module):
    def __init__(self, dim, memory):
        super().__init__()
        self.memory = memory
        self.norm_h, self.norm_m, self.norm_q = (nn.LayerNorm(dim, eps=1e-12) for _ in range(3))
        self.query, self.over = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.g_q, self.g_k, self.g_v = (nn.Parameter(torch.zeros(dim)) for _ in range(3))

    def step(self, x, past):
        """x [batch, time, dim], past [batch, n, dim] or None -> outputs in the shape of x, and the next past."""
        h, m = self.norm_h(x), self.norm_m(x)
        m = m if past is None else torch.cat([past, m], 1)
        q = self.norm_q(self.query(h)) * self.g_q.sigmoid()
        k = m * self.g_k.sigmoid()
        c, f = self.over(self.g_v.sigmoid()).chunk(2, -1)
        v = m * f.sigmoid() * c.tanh()
        distance = m.shape[1] - x.shape[1] + torch.arange(x.shape[1])[:, None] - torch.arange(m.shape[1])
        hidden = (distance < 0) | (distance >= self.memory)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(x.shape[-1])).masked_fill(hidden, -torch.inf)
        return h + scores.softmax(-1) @ v, m[:, -self.memory :]


# ## Boom
#
# The feed-forward network widens to $4\, \mathrm{dim}$ without a second matrix: the four slices are added. It has half
# the weights. The activation is $x\, \sigma(1.702 x)$, close to GELU.


def boom(x, up):
    x = up(x)
    x = x * (1.702 * x).sigmoid()
    return sum(x.split(up.in_features, -1))


# ## The layer
#
# The stream itself is normed before each sum, and each part reads a second norm of the same vector. The LSTM has no
# shortcut. So no path leads through the model without norms; the cells carry the gradient instead.


class Layer(nn.Module):
    def __init__(self, dim, memory, hidden_dim):
        super().__init__()
        self.w, self.u = (nn.Parameter(torch.randn(4 * dim, dim) / math.sqrt(dim)) for _ in range(2))
        self.b = nn.Parameter(torch.zeros(4 * dim))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim, eps=1e-12) for _ in range(3))
        self.attention = Attention(dim, memory) if memory else None
        self.up = nn.Linear(dim, hidden_dim)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        zeros = x.new_zeros(len(x), x.shape[-1])
        recurrent, past = state or ((zeros, zeros), None)
        x, recurrent = lstm(self.norm1(x), recurrent, self.w, self.u, self.b)
        if self.attention is not None:
            x, past = self.attention.step(x, past)
        return self.norm2(x) + boom(self.norm3(x), self.up), (recurrent, past)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# A layer stores $2\, \mathrm{dim}$ numbers of the LSTM, and with attention one vector for each of the last `memory`
# tokens: 1,024 of 256 numbers in the recipe small, half of what softmax attention stores. A token compares with these.
# A whole text and single steps are one method here, and both forms agree; causality would break only if the memory held
# later tokens. Without attention it is a stack of LSTMs. With a memory as long as the text, equal norms and gates of 1,
# the head is exact softmax attention with keys equal to values.
#
# The paper claims 1.07 to 1.08 bits per character on enwik8, near Transformers of the same size, after a day on one
# GPU. Our result page "causal_members" measures 2.115 bits per byte in 1.5 minutes of one thread, where `gpt` has
# 2.071; in four minutes it is 1.798 and 1.732 ("quality"). A step takes 146 ms and 118.
#
# Take it for a small recurrent model on one processor that streams text. Do not take it to train long sequences in
# parallel: the recurrence goes token by token.

# --- proof ---
# The library's layer with the same weights gives the same outputs, gradients and streamed steps.


import proofs

import kinformer


def proof():
    names = {
        "inner.mixer.rnn.weight_ih_l0": "w",
        "inner.mixer.rnn.weight_hh_l0": "u",
        "inner.mixer.rnn.bias_ih_l0": "b",
        "inner.mixer.rnn.bias_hh_l0": lambda weights: 0 * weights["b"],  # PyTorch's LSTM adds two
        "inner.mixer_norm": "norm1",
        "inner.stream_norm": "norm2",
        "inner.feed_forward_norm": "norm3",
        "inner.feed_forward.up": "up",
    }
    attention = {
        "input_norm": "norm_h", "memory_norm": "norm_m", "query_norm": "norm_q", "query": "query", "value": "over",
        "q_gate": "g_q", "k_gate": "g_k", "v_gate": "g_v",
    }  # fmt: skip
    names |= {f"inner.attention.{there}": f"attention.{here}" for there, here in attention.items()}
    for memory in (64, 9):
        print(f"a memory of {memory}")
        page = Layer(32, memory, 128)
        with torch.no_grad():
            for weight in page.parameters():
                weight.add_(0.2 * torch.randn_like(weight))
        settings = {"attention.memory": memory, "feed_forward.hidden_dim": 128}
        library = kinformer.layer("sha-rnn", 32, whole=True, set=settings)
        proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)


def train():
    return proofs.train(lambda: Layer(64, 128, 256), __file__, length=64, steps=60)


def draw(figure, model):
    """The weights of the head beside how far a change acts through the LSTM alone, and the stored numbers."""
    layer = model.layers[0]
    text = torch.tensor(list(b"a recurrent network knows the near past; one head looks far back"))
    with torch.no_grad():
        x = model.norms[0](model.embed(text)[None] + model.position.weight[: len(text)])
        zeros = torch.zeros(1, 64)
        y, _ = lstm(layer.norm1(x), (zeros, zeros), layer.w, layer.u, layer.b)
        h, m = layer.attention.norm_h(y), layer.attention.norm_m(y)
        q = layer.attention.norm_q(layer.attention.query(h)) * layer.attention.g_q.sigmoid()
        scores = (q @ (m * layer.attention.g_k.sigmoid()).transpose(-2, -1) / 8)[0]
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    left, middle, right = figure.subplots(1, 3)
    left.imshow(scores.masked_fill(future, -torch.inf).softmax(-1) * torch.arange(1, len(text) + 1)[:, None], vmax=4)
    left.set(title="the head", xlabel="key", ylabel="query")
    x = x.requires_grad_()
    y, _ = lstm(layer.norm1(x), (zeros, zeros), layer.w, layer.u, layer.b)
    middle.semilogy(torch.autograd.grad(y[0, -1].square().sum(), x)[0][0].norm(dim=-1).flip(0))
    middle.set(title="gradient of the LSTM", xlabel="tokens back")
    lengths = torch.arange(0, 4096, 64)
    right.plot(lengths, 2 * 256 * lengths, label="softmax attention")
    right.plot(lengths, 256 * lengths.clamp(max=1024) + 512, label="SHA-RNN")
    right.set(title="numbers stored", xlabel="tokens")
    right.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
