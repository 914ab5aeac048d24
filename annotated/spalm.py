# # SPALM: a gate to a long-term memory
#
# *Paper: Yogatama, de Masson d'Autume, Kong: Adaptive Semiparametric Language Models (2021), arXiv 2102.02557. Members:
# `spalm`. Measured: spalm.*
#
# **Problem.** kNN-LM mixes the votes of neighbours into a finished model, with one share for all tokens. But a
# neighbour helps with a name and harms with an article. The model should decide, token by token.
#
# **Idea.** Three memories in one model: attention to the present segment, Transformer-XL's cached states of the segment
# before, and a datastore of the whole training text. A neighbour of the present context contributes the embedding $y_i$
# of the token that followed it, attention weighs the neighbours, and a gate decides between their mean and the model's
# state $h_t$:
#
# $$ m_t = \sum_i \frac{\exp(y_i \cdot h_t)}{\sum_j \exp(y_j \cdot h_t)}\, y_i, \quad g_t = \sigma(w \cdot h_t) $$
#
# $$ z_t = (1 - g_t)\, m_t + g_t\, h_t, \quad p(x_{t+1}) = \mathrm{softmax}(E z_t) $$
#
# $E$ is the table of token embeddings, tied with the output.

import torch
from torch import nn
from torch.nn import functional as F

# ## Neighbours
#
# The search uses another, frozen model: its vectors of the contexts are the keys. So the neighbours of each training
# token never change, and are looked up once, before training. The nearest entry of a training token is the token
# itself, with the answer; it must be left out, or the gate learns to copy.
#
# Causality holds, because a key and a query see only tokens before the one to predict.


def neighbours(queries, keys, following, n, own=None):
    """queries [t, width], keys [entries, width], following [entries], own [t]: the entry to leave out -> the tokens
    that followed the n nearest entries, [t, n]."""
    distances = torch.cdist(queries, keys)
    if own is not None:
        distances = distances.scatter(1, own[:, None], torch.inf)
    return following[distances.topk(n, largest=False).indices]


# ## The head
#
# The distances of the search are not used. The model's own state weighs the neighbours, by the same product $y \cdot h$
# that would give the logit of that token: the neighbours are a short list, and the head is a softmax over this list.
# Its gradient reaches the embeddings $y_i$, so the table learns from neighbours too.
#
# A gate of 1 ignores the memory. A gate near 0 replaces the state by the memory: then only the tokens on the list, and
# tokens with similar embeddings, are probable. The convex sum keeps the logits on the scale of the state; with $z = m +
# h$, the state would have to unlearn its own prediction where the memory is right.
#
# The printed gate is one number a token. A vector of gates, one a feature, is a variant.


class Head(nn.Module):
    def __init__(self, dim, vocabulary):
        super().__init__()
        self.embedding = nn.Parameter(0.02 * torch.randn(vocabulary, dim))
        self.w = nn.Linear(dim, 1, bias=False)

    def memory(self, h, tokens):
        """h [batch, time, dim], tokens [batch, time, n] -> m [batch, time, dim]."""
        y = self.embedding[tokens]
        weights = (y @ h[..., None]).softmax(-2)
        return (weights * y).sum(-2)

    def forward(self, h, tokens=None):
        """The same -> logits [batch, time, vocabulary]; without neighbours, of the model alone."""
        if tokens is not None:
            gate = self.w(h).sigmoid()
            h = (1 - gate) * self.memory(h, tokens) + gate * h
        return h @ self.embedding.T


# ## Training
#
# The loss is the ordinary one. kNN-LM weighs two finished models; here table, gate and decoder learn together, and $h$
# can leave to the memory such predictions. The body of the model is Transformer-XL (`transformer_xl.py`), whose state
# is stored while generating.


def loss(head, h, tokens, neighbour_tokens):
    """h [batch, time, dim] of tokens [batch, time], neighbour_tokens [batch, time, n]."""
    logits = head(h[:, :-1], neighbour_tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# ## Costs, and when to take it
#
# A token costs the retriever's forward pass, one search, and $2\, n\, \mathrm{dim}$ products for $n$ neighbours; the
# gate has `dim` weights. Stored are Transformer-XL's memory, the retriever's state, and the datastore, one key a token
# of the training text. Without neighbours, or with a gate of 1, it is Transformer-XL. With one neighbour, $m$ is its
# embedding. With each token of the vocabulary once on the list, $m$ is softmax attention from $h$ to the table.
#
# The paper claims better perplexity than Transformer-XL and than kNN-LM on WikiText-103, WMT news and enwik8. Our
# result page "spalm" measures short training of small models on bytes: Transformer-XL 2.757 bits per byte, with the
# gate and four neighbours 2.732. But kNN-LM's mixture of the same datastore with the retriever takes 2.805 to 2.283,
# with up to 64 neighbours. A list of four tokens, weighed by a barely trained state, says less than 64 counted ones.
#
# Take it where a datastore is at hand while you train, and training is long. Where the model is finished or training
# brief, mix neighbours in (`knn-lm`).

# --- proof ---
# The library's head with the same weights gives the same logits and gradients.


from pathlib import Path

import proofs

import kinformer


def proof():
    model = kinformer.build("spalm", recipe="tiny", set={"layers.*.mixer.segment": 8}).double()
    weights = dict(model.named_parameters())
    table, gate = model.input.table, weights["head.gate.weight"]
    vocabulary, dim = table.shape
    page = Head(dim, vocabulary)
    page.load_state_dict({"embedding": table.detach(), "w.weight": gate.detach()})
    h = torch.randn(2, 20, dim, requires_grad=True)
    tokens = torch.randint(vocabulary, (2, 20))
    for n in (1, 4, 16):
        found = torch.randint(vocabulary, (2, 20, n))
        ours, theirs = page(h, found), model.head(h, model.input, neighbours=found)
        proofs.equal(f"logits with {n} neighbours", ours, theirs)
        there = F.cross_entropy(theirs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        ours = torch.autograd.grad(loss(page, h, tokens, found), [h, page.embedding, page.w.weight])
        theirs = torch.autograd.grad(there, [h, table, gate])
        proofs.equal("gradients", *(torch.cat([g.flatten() for g in grads]) for grads in (ours, theirs)))
    proofs.equal("logits without neighbours", page(h), model.head(h, model.input))

    order = torch.randperm(16)
    proofs.equal("neighbours in another order", page(h, found[..., order]), page(h, found))


class Reader(nn.Module):
    """A model that sees one byte, with the page's head: longer contexts are the business of the memory."""

    def __init__(self, dim=64):
        super().__init__()
        self.head, self.read = Head(dim, 256), nn.Sequential(nn.Linear(dim, 256), nn.GELU(), nn.Linear(256, dim))
        nn.init.normal_(self.head.embedding, std=0.3)

    def forward(self, tokens):
        return self.read(self.head.embedding[tokens])


def contexts(tokens, width=64):
    """The keys [time, width] of a frozen retriever: fixed random vectors of the last twelve bytes, fading."""
    vectors = torch.randn(12, 256, width, generator=torch.Generator().manual_seed(0))
    lagged = F.pad(tokens, (11, 0)).unfold(0, 12, 1).flip(1)
    return sum(0.8**lag * vectors[lag][lagged[:, lag]] for lag in range(12))


def train():
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes().split(b"# --- proof")[0]))
    keys, following = contexts(text)[:-1], text[1:]
    found = neighbours(keys, keys, following, 4, own=torch.arange(len(keys)))
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        starts = torch.randint(len(keys) - 129, (8,))
        places = starts[:, None] + torch.arange(129)
        value = loss(model.head, model(text[places]), text[places], found[places])
        if step in (0, 199):
            print(f"step {step}: {value.item() / 0.6931:.2f} bits per byte")
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return model


@torch.no_grad()
def draw(figure, model):
    """The probability of each next byte of a sentence, with and without neighbours, and the share of the memory."""
    text = torch.tensor(list(Path(__file__).read_bytes().split(b"# --- proof")[0]))
    sentence = b"the neighbours of each training token are a short list; a zebra has stripes"
    tokens = torch.tensor(list(sentence))
    found = neighbours(contexts(tokens), contexts(text)[:-1], text[1:], 4)[None]
    h, places = model(tokens[None]), torch.arange(len(tokens) - 1)
    axes = figure.subplots()
    for shift, label, logits in (
        (-0.2, "with neighbours", model.head(h, found)),
        (0.2, "the state alone", model.head(h)),
    ):
        axes.bar(places + shift, logits.softmax(-1)[0, places, tokens[1:]], width=0.4, label=label)
    axes.plot(places, 1 - model.head.w(h)[0, :-1, 0].sigmoid(), "k.", label="share of the memory")
    axes.set(xticks=places, xlabel="byte to predict", ylabel="probability", ylim=(0, 1.25))
    axes.set_xticklabels(sentence.decode()[1:], fontsize="small")
    axes.legend(fontsize="small", ncols=3, loc="upper right")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
