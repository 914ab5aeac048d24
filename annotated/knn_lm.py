# # kNN-LM: the training text as a memory
#
# *Paper: Khandelwal, Levy, Jurafsky, Zettlemoyer, Lewis: Generalization through Memorization: Nearest Neighbor Language
# Models (2020), arXiv 1911.00172. Members: `knn-lm`. Measured: knn_domain, datastore, quantised_lists.*
#
# **Problem.** A language model must store rare facts in its weights. It has seen the sentence with the name once, and
# forgets it. A new text can only be added by more training.
#
# **Idea.** A model may fail to predict a rare word, and yet recognise that two contexts are alike. So store each
# context of a text as a vector $k_i$, with the token $v_i$ that followed. To predict, find the nearest stored contexts
# of the present one, let them vote, and mix the vote with the model's own probabilities:
#
# $$ p(y) = \lambda\, p_{\mathrm{kNN}}(y) + (1 - \lambda)\, p_{\mathrm{LM}}(y) $$
#
# $$ p_{\mathrm{kNN}}(y) = \sum_{i \in N(q),\, v_i = y}
# \frac{\exp(-|q - k_i|^2 / \tau)}{\sum_{m \in N(q)} \exp(-|q - k_m|^2 / \tau)} $$
#
# The model is not trained again.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The vector of a context
#
# The model is a plain decoder. Which of its vectors represents the context? The paper compares several and takes the
# input of the last layer's feed-forward network, after its norm: attention has gathered the context there, and the
# feed-forward network has not yet turned it towards one prediction. The norm also gives all keys a similar length, so
# that squared distances are comparable.


class Layer(nn.Module):
    def __init__(self, dim, num_heads, hidden_dim):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def read(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs, keys of the contexts, both in the
        shape of x, and the next state."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        key = self.norm2(x)
        return x + self.down(F.relu(self.up(key))), key, (k, v)

    def step(self, x, state=None):
        y, _, state = self.read(x, state)
        return y, state

    def forward(self, x):
        return self.step(x)[0]


# ## The datastore
#
# One pass over a text fills it: an entry for each token but the last. The key of a context knows only tokens before the
# one that it predicts, so the datastore does not break causality. An evaluated text must not be in it: each context
# would find itself, with the answer.


def store(keys, tokens):
    """keys [batch, time, dim] of tokens [batch, time] -> entries: keys [n, dim], and the tokens [n] that followed."""
    return keys[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()


# ## The vote
#
# The search compares squared distances, which is the exact form. Large stores are searched in lists: keys are grouped
# around some thousand centres, and only the lists of the nearest centres are read.
#
# The softmax runs over the neighbours found and falls with the squared distance: a Gaussian kernel, so that the vote is
# a kernel estimate of the next token's distribution. As the temperature $\tau$ approaches 0 the nearest neighbour
# decides alone; with a large $\tau$ neighbours are counted. With all entries as neighbours it is softmax attention from
# $q$ to the whole text, with one-hot values.


def search(q, keys, n):
    """q [queries, dim], keys [entries, dim] -> squared distances and numbers of the n nearest entries, [queries, n]."""
    return torch.cdist(q, keys, compute_mode="donot_use_mm_for_euclid_dist").square().topk(n, largest=False)


def vote(distances, tokens, vocabulary, temperature):
    """distances and tokens [queries, n] -> probabilities [queries, vocabulary]."""
    weights = (-distances / temperature).softmax(-1)
    return torch.zeros(len(weights), vocabulary).scatter_add(1, tokens, weights)


# ## The mixture
#
# Most tokens get no vote at all, and $\log 0$ would be $-\infty$. The mixture is a sum of probabilities, and the
# model's share keeps it positive. $\lambda = 0$ is the model alone. The paper tunes $\lambda$ on held-out text, one
# number for all tokens; it finds 0.25 for a text that the model was trained on.


def mixture(logits, votes, share):
    """logits, votes [queries, vocabulary] -> log-probabilities."""
    return (share * votes + (1 - share) * logits.softmax(-1)).log()


# ## Costs, and when to take it
#
# A store holds one vector a token of its text: the paper's 103 million entries of 1,024 numbers are about 200 GB in 16
# bits, or 64 bytes a key in quantised lists. A token costs one search. Exact search makes as many products as the store
# has numbers; while generating, the decoder's cache of keys and values grows beside it.
#
# The paper claims 16.12 perplexity on WikiText-103 instead of 18.65, with the training text as the store. Our result
# page "knn_domain" measures another use: a model of *War and Peace* reads Shakespeare at 4.14 bits per byte, and at
# 3.23 with 120,000 of his bytes in a store, without training. "datastore" measures time: ten million keys of 256
# numbers take 1.13 GiB in lists, and eight of the lists find 99 % of the neighbours of 1,024 queries in 1.3 s, where
# exact search takes 34 s for 256. Quantised to 16 bytes a key, ten million keys of 64 numbers take 234 MiB
# ("quantised_lists").
#
# Take it to add a text to a finished model, or to see which sentences a prediction comes from. Do not take it where
# memory and the time of a search at every token are too dear.

# --- proof ---
# The library gives the same outputs, keys, neighbours and probabilities.


from pathlib import Path
from tempfile import TemporaryDirectory

import proofs

import kinformer
from kinformer.core.parts import Neighbours
from kinformer.heads.language import KnnMixture
from kinformer.lab.datastore.keys import KeyedDecoder
from kinformer.lab.datastore.search import ExactSearch
from kinformer.lab.datastore.store import Datastore, KeySpace, Writer

NAMES = {
    "mixer_residual.norm": "norm1",
    "mixer.projection.qkv": "qkv",
    "mixer.out": "out",
    "feed_forward_residual.norm": "norm2",
    "feed_forward.up": "up",
    "feed_forward.down": "down",
}


def proof():
    page = Layer(32, 4, 64)
    library = kinformer.layer("knn-lm", 32, num_heads=4, whole=True, set={"feed_forward.hidden_dim": 64})
    names = {f"inner.{there}": here for there, here in NAMES.items()}
    proofs.compare(page, library, names, torch.randn(2, 30, 32), page.step)

    model = KeyedDecoder(kinformer.build("knn-lm", recipe="tiny").double().eval())
    last, seen = model.decoder.stack.units[-1], []
    last.mixer_residual.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens = torch.randint(256, (8, 30))
    with torch.no_grad():
        (hidden, theirs), _ = model(tokens)
        page = Layer(theirs.shape[-1], last.mixer.projection.shape[1], last.feed_forward.up.out_features)
        weights = last.state_dict()
        page.load_state_dict(
            {
                n: weights[t + n.removeprefix(h)]
                for t, h in NAMES.items()
                for n in page.state_dict()
                if n.startswith(h + ".")
            }
        )
        _, keys, _ = page.read(seen[-1])
        proofs.equal("keys", keys, theirs)
        logits = model.decoder.logits(hidden)[-1]

    stored, following = store(keys[:-1], tokens[:-1])
    distances, entries = search(keys[-1], stored, 16)
    with TemporaryDirectory() as folder:
        space = KeySpace(weights="", representation="", dim=stored.shape[1], vocab_size=256, tokenizer="")
        with Writer(folder, space, dtype="float32") as writer:
            writer.begin({}, len(stored))
            writer.append(stored, following.numpy())
            writer.flush()
        found = ExactSearch(Datastore(folder)).search(keys[-1], 16)
    assert (found.entries == entries).all()
    proofs.equal("distances, in float32 there", distances, found.distances.double(), 1e-4)

    class Found:
        def search(self, queries, neighbours):
            return Neighbours(distances, following[entries], entries)

    for share, temperature in ((0.25, 1.0), (0.9, 20.0)):
        ours = mixture(logits, vote(distances, following[entries], 256, temperature), share)
        theirs = KnnMixture(Found(), weight=share, temperature=temperature)(logits, keys[-1])
        proofs.equal("log-probabilities", ours, theirs)


class Attention(Layer):
    """The attention of a layer alone, for the shared model of training."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads, 1)
        self.norm1 = nn.Identity()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def train():
    return proofs.train(lambda: Attention(64, 4), __file__)


def draw(figure, model):
    """Another page, which the model has not seen: bits per byte with stores of some of its other bytes."""
    text = torch.tensor(list((Path(__file__).parent / "gpt.py").read_bytes()))
    rows, keys = text[: len(text) // 128 * 128].view(-1, 128), []
    model.feed[1].register_forward_pre_hook(lambda _, inputs: keys.append(inputs[0]))
    with torch.no_grad():
        logits = model(rows)
    held = rows[::4, 1:].flatten()
    q, held_logits = keys[0][::4, :-1].flatten(0, 1), logits[::4, :-1].flatten(0, 1)
    others = [i for i in range(len(rows)) if i % 4]
    stored, following = store(keys[0][others], rows[others])
    left, right = figure.subplots(1, 2)
    sizes = [64, 128, 256, 512, 1024, 2048, len(stored)]
    shares = torch.linspace(0, 0.95, 20)

    def bits(size, share, temperature=8.0):
        distances, entries = search(q, stored[:size], min(32, size))
        votes = vote(distances, following[entries], 256, temperature)
        return F.nll_loss(mixture(held_logits, votes, share), held).item() / math.log(2)

    left.semilogx(sizes, [min(bits(size, share) for share in shares[::3]) for size in sizes], marker="o")
    left.axhline(bits(64, 0.0), color="gray", linestyle="--", label="the model alone")
    left.set(title="a page that the model has not seen", xlabel="entries", ylabel="bits per byte")
    left.legend(fontsize="small")
    for size in (64, 512, sizes[-1]):
        right.plot(shares, [bits(size, share) for share in shares], label=f"{size} entries")
    right.set(title="share of the vote", xlabel="share", ylim=(None, bits(64, 0.0) + 1.5))
    right.legend(fontsize="small")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
