# # Reading both sides: BERT
#
# *Paper: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding (2018), arXiv
# 1810.04805. Members: `bert`. Measured: masked_language.*
#
# **Problem.** A model that predicts the next token must not see later tokens. To understand a word, though, both sides
# help: the words behind "bank" may say which sort of bank is meant.
#
# **Idea.** Change the task. Hide some tokens of a text and predict them from all others:
#
# $$ L = - \frac{1}{|M|} \sum_{i \in M} \ln p(x_i \mid x_{\mathrm{hidden}}) $$
#
# Nothing has to be causal then, so every token may attend to every other. The vectors that this task produces are good
# features of a text, and a small head on top is tuned for each task.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Attention without a causal mask
#
# The softmax runs over all tokens of the text, before and behind. The division by $\sqrt{d}$ keeps the scores near a
# standard deviation of 1. Only padding is hidden, since a batch holds texts of several lengths. An encoder has no
# cached step: a new token at the end changes the vectors of all others, so nothing can be stored, and a longer text is
# read anew.


def attention(q, k, v, real):
    """q, k, v [batch, heads, time, head_dim], real bool [batch, time] -> the shape of q."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1) @ v


# ## The layer
#
# BERT is the encoder of the original Transformer: each sublayer is added to its input, and the sum is normalised
# (post-norm). The activation is a GELU in its exact form, $x \, \Phi(x)$.


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, real):
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = attention(q, k, v, real).transpose(1, 2).reshape(batch, time, dim)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


# ## The model
#
# Without a causal mask, attention is blind to order: shuffled tokens would give the same vectors, shuffled. So a
# learned vector of the position is added, and the texts end where its table ends, at 512 tokens. A norm follows. The
# head that predicts hidden tokens is one more product with GELU and norm, then the table of tokens, and a bias for each
# token. It is thrown away when the model is tuned for another task.


class Model(nn.Module):
    def __init__(self, vocab=259, dim=64, depth=2, num_heads=4, max_length=128):
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(vocab, dim))
        self.position = nn.Parameter(0.02 * torch.randn(max_length, dim))
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([Layer(dim, num_heads) for _ in range(depth)])
        self.dense, self.head_norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def encode(self, tokens, real=None):
        """tokens [batch, time] -> vectors [batch, time, dim]; ``real`` is False for padding."""
        real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        x = self.norm(F.embedding(tokens, self.table) + self.position[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x, real)
        return x

    def forward(self, tokens, real=None):
        return self.head_norm(F.gelu(self.dense(self.encode(tokens, real)))) @ self.table.T + self.bias


# ## Hiding tokens
#
# 15 % of the tokens are predicted. Four fifths are replaced by a token MASK, a tenth by a random token, and a tenth
# stay. The last two kinds matter: texts of later tasks do not contain MASK, and the model has to keep a good vector for
# every token, because each one may be wrong.


def hide(tokens, mask_token, vocab):
    """Return the tokens that the model sees, and a mask of the tokens to predict."""
    predicted = torch.rand(tokens.shape) < 0.15
    kind = torch.rand(tokens.shape)
    seen = tokens.masked_fill(predicted & (kind < 0.8), mask_token)
    other = predicted & (kind >= 0.8) & (kind < 0.9)
    return torch.where(other, torch.randint(vocab, tokens.shape), seen), predicted


def loss(model, tokens, mask_token=256, vocab=256):
    seen, predicted = hide(tokens, mask_token, vocab)
    return F.cross_entropy(model(seen)[predicted], tokens[predicted])


# ## Costs, and when to take it
#
# A text costs $T^2$ comparisons a layer, twice the visible pairs of a decoder, and gives a loss at 15 % of its tokens
# where a decoder has one at each. Nothing is stored. It is exact attention; with a causal mask, pre-norm and the loss
# of the next token, it is `gpt`.
#
# The paper reports 80.5 on GLUE and an F1 of 93.2 on SQuAD 1.1, each ahead of all earlier systems, from one model that
# is tuned for each task. (It also trained on pairs of sentences, which RoBERTa found unnecessary, and this page leaves
# out.) On our result page "masked_language", after ten minutes of one core, a small BERT needs 1.54 bits for a hidden
# byte and finds 71 % of these bytes; the frequency of a byte behind the true one before it needs 3.52. That model has
# norms before the sublayers and rotary positions: the published shape stays near the frequencies of bytes for its first
# hundreds of steps.
#
# Take it where texts of some hundred tokens are classified or searched, or gaps are filled. Do not take it where texts
# are continued, or long: for these, `longformer` and `big-bird` see a part of the pairs.

# --- proof ---
# The library's model with the same weights gives the same logits and gradients, also with padding.


import proofs

import kinformer


def proof():
    names = {"input.embedding.weight": "table", "position.table": "position", "embedding_norm": "norm"}
    names |= {"head.dense": "dense", "head.norm": "head_norm", "head.bias": "bias"}
    for i in range(2):
        names |= {
            f"stack.layers.{i}.mixer.projection.qkv": f"layers.{i}.qkv",
            f"stack.layers.{i}.mixer.out": f"layers.{i}.out",
            f"stack.layers.{i}.feed_forward.up": f"layers.{i}.up",
            f"stack.layers.{i}.feed_forward.down": f"layers.{i}.down",
            f"stack.layers.{i}.mixer_residual.norm": f"layers.{i}.norm1",
            f"stack.layers.{i}.feed_forward_residual.norm": f"layers.{i}.norm2",
        }
    page, library = Model(dim=32, num_heads=2), kinformer.build("bert", recipe="tiny")
    tokens = torch.randint(259, (2, 40))
    proofs.compare(page, library, names, tokens)
    real = torch.arange(40) < torch.tensor([[40], [25]])
    print("with padding")
    proofs.equal("outputs", page(tokens, real)[real], library(tokens, valid=real)[real])
    seen, predicted = hide(torch.full((200, 200), 7), 256, 256)
    shares = [
        (predicted & choice).double().mean() / 0.15 for choice in (seen == 256, (seen != 256) & (seen != 7), seen == 7)
    ]
    assert torch.allclose(torch.stack(shares), torch.tensor([0.8, 0.1, 0.1]), atol=0.03)


def palindromes(count):
    half = torch.randint(26, (count, 8))
    return torch.cat([half, half.flip(1)], 1)


def train():
    """Train on palindromes of 16 letters, where a hidden letter stands on the other side, before or behind."""
    torch.manual_seed(0)
    model, losses = Model(27, depth=1, max_length=16), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 50)
        value = loss(model, palindromes(64), mask_token=26, vocab=26)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item() / math.log(2))
    last = sum(losses[-20:]) / 20
    print(f"palindromes: {losses[0]:.2f} bits for a hidden letter at first, {last:.2f} after 200 steps")
    return model


def draw(figure, model):
    """Attention of the trained heads in a palindrome with a hidden letter: they read the mirrored place."""
    text = b"abcdefghhgfedcba"
    tokens = torch.tensor([[byte - 97 for byte in text]])
    tokens[0, 3] = 26
    layer = model.layers[0]
    with torch.no_grad():
        x = model.norm(F.embedding(tokens, model.table) + model.position)
        q, k, _ = layer.qkv(x).view(1, 16, 3, 4, -1).permute(2, 0, 3, 1, 4)
        weights = attention(q, k, torch.eye(16).expand(1, 4, -1, -1), tokens >= 0)[0]
        chance = model(tokens)[0, 3].softmax(-1)[text[3] - 97].item()
    for head, axes in enumerate(figure.subplots(1, 4)):
        axes.imshow(weights[head], vmin=0)
        axes.set_xticks(range(16), "abc_efghhgfedcba", fontsize=6)
        axes.set_yticks(range(16), "abc_efghhgfedcba", fontsize=6)
        axes.set(title=f"head {head}", xlabel="key", ylabel="query" if head == 0 else "")
    figure.suptitle(f"the hidden d is predicted with the probability {chance:.2f}", fontsize=10)


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
