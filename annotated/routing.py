# # Routing Transformer: attention within clusters
#
# *Paper: Roy, Saffar, Vaswani, Grangier, Efficient Content-Based Sparse Attention with Routing Transformers (2021),
# arXiv 2003.05997. Members: `routing`. Measured: hashing, mqar_variants, causal_members.*
#
# **Problem.** Full attention compares $T^2 / 2$ pairs of tokens. Patterns by position, such as windows and strides, are
# cheap, but they decide before reading which tokens may meet.
#
# **Idea.** Let content decide. Tokens are sorted into clusters by k-means while the model trains, and a token sees the
# others in its cluster:
#
# $$ y_i = \sum_{j \in C_i} p_{ij} v_j, \quad
# p_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt{d})}{\sum_{m \in C_i} \exp(q_i \cdot k_m / \sqrt{d})}, \quad
# C_i = \{ j < i : c(k_j) = c(k_i) \} $$
#
# Half of the heads work like this. The others keep a local window, since near tokens matter whatever they are about.

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## The cluster of a token
#
# Query and key of a token must lie in the same cluster, or a token with a query would find no keys. So both are one
# vector: the key is the query divided by its length, $k = q / |q|$. (The authors normalise queries and keys by a layer
# norm without weights; the unit key is from a PyTorch version in wide use.) On a sphere the nearest centroid is the one
# with the largest product:
#
# $$ c(k) = \arg\max_c\; k \cdot \mu_c $$


def clusters(k, centroids):
    """k [batch, heads, time, head_dim], centroids [heads, clusters, head_dim] -> [batch, heads, time]."""
    return (k @ centroids.transpose(-2, -1)).argmax(-1)


# ## Online k-means
#
# The centroids are not trained by gradients. After each step every centroid moves towards the mean direction of its
# tokens, with a moving average of decay $\lambda = 0.999$. A small loss draws the tokens towards their centroids, so
# that clusters become tight. (The paper's formula adds $s_c$ itself, and its code divides by a moving count. The
# direction keeps centroids near the sphere of the keys.)
#
# $$ \mu_c \leftarrow \lambda \mu_c + (1 - \lambda) \frac{s_c}{|s_c|}, \quad s_c = \sum_{i : c(k_i) = c} k_i, \qquad
# \mathrm{loss} = \beta\, \mathrm{mean} (k - \mu_{c(k)})^2 $$


def moved(centroids, k, decay=0.999):
    """The centroids after a training step with the keys k. A centroid without tokens stays."""
    members = F.one_hot(clusters(k, centroids), centroids.shape[1]).to(k.dtype)
    total = (members.transpose(-2, -1) @ k).sum(0)
    length = total.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, decay * centroids + (1 - decay) * total / length.clamp_min(1e-12), centroids)


# ## Which tokens of the cluster
#
# A cluster can hold half of the text. The paper balances: every centroid takes the $w$ most similar tokens of the
# sequence. Membership then depends on later tokens, so the published model is not causal. In a measurement (result page
# "hashing") 47 % of the outputs before the changed tokens changed.
#
# Here, and in the library, a token belongs to its nearest centroid, and sees the last tokens of that cluster: chunks of
# $w / 2$ tokens are cut by rank, and a token sees its own chunk and the chunk before. The rank counts earlier tokens of
# the cluster, so no later token can change it.
#
# A key of length 1 is most similar to its own query, which says nothing new. A token sees itself only where it sees
# nothing else.


def seen(cluster, count, window):
    """cluster [batch, heads, time] below `count` -> bool [batch, heads, query, key]."""
    rank = F.one_hot(cluster, count).cumsum(-2).gather(-1, cluster[..., None]).squeeze(-1) - 1
    chunk = rank // (window // 2)
    same = cluster[..., :, None] == cluster[..., None, :]
    mask = same & (rank[..., None, :] < rank[..., :, None]) & (chunk[..., None, :] >= chunk[..., :, None] - 1)
    itself = torch.eye(cluster.shape[-1], dtype=torch.bool)
    return mask | (itself & ~mask.any(-1, keepdim=True))


def attention(q, k, v, mask):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


# ## The layer
#
# The softmax normalises over the tokens that a query sees, so its weights sum to 1 in clusters of every size. With one
# cluster, a window of at least the length, and no local heads, the layer is exact: softmax attention to the past with
# shared queries and keys.
#
# The page keeps all keys and values while it generates. Each local head needs the last $w - 1$ tokens, and each cluster
# of a routed head at most $w - 1$; so a fast cache is bounded.


class RoutingAttention(nn.Module):
    def __init__(self, dim, num_heads, local_heads, num_clusters, window):
        super().__init__()
        self.head_dim, self.window = dim // num_heads, window
        routed_heads = num_heads - local_heads
        self.local = nn.Linear(dim, 3 * local_heads * self.head_dim, bias=False)
        self.routed = nn.Linear(dim, 2 * routed_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        centroids = F.normalize(torch.randn(routed_heads, num_clusters, self.head_dim), dim=-1)
        self.register_buffer("centroids", centroids)

    def heads(self, x, product, parts):
        return product(x).view(*x.shape[:2], parts, -1, self.head_dim).permute(2, 0, 3, 1, 4)

    def step(self, x, state=None):
        """x [batch, time, dim] behind the tokens of the state -> outputs of the same shape, and the next state."""
        near, far = self.heads(x, self.local, 3), self.heads(x, self.routed, 2)
        if state is not None:
            near, far = torch.cat([state[0], near], 3), torch.cat([state[1], far], 3)
        distance = torch.arange(near.shape[3])[:, None] - torch.arange(near.shape[3])
        local = attention(*near, (distance >= 0) & (distance < self.window))
        q, v = far
        k = F.normalize(q, dim=-1)
        routed = attention(q, k, v, seen(clusters(k, self.centroids), self.centroids.shape[1], self.window))
        y = torch.cat([local, routed], 1)[:, :, -x.shape[1] :]
        return self.out(y.transpose(1, 2).flatten(2)), (near, far)

    def forward(self, x):
        return self.step(x)[0]


# ## Costs, and when to take it
#
# With $\sqrt{T}$ clusters and a window of $\sqrt{T}$ tokens, a text costs about $T \sqrt{T}$ scores and as many
# products with centroids, where full attention costs $T^2 / 2$ scores. With a fixed window the cost is linear.
#
# Take it when long texts fall into topics. Do not take it when exact recall counts or training is brief: the clusters
# must form first, and a query whose key lies in another cluster never finds it.
#
# The paper reports a perplexity of 15.8 on WikiText-103 and 3.43 bits per dimension on ImageNet at 64 x 64. On our
# result page "hashing" the time of a step grows as length$^{0.99}$ up to 32,768 tokens. On "mqar_variants" recall
# follows the clusters: 99 % with one cluster, 85 % with two, 1 to 9 % with eight. On "causal_members", in a minute and
# a half, `routing` has 2.308 bits per byte and `gpt` 2.071.

# --- proof ---
# The library's layer with the same weights and centroids gives the same outputs, gradients and streamed steps, moves
# its centroids alike after a step, and adds up the same loss.


import proofs

import kinformer


def qkv(weights):
    return torch.cat([weights["local.weight"], weights["routed.weight"]])


def proof():
    names = {"inner.qkv.weight": qkv, "inner.out": "out", "inner.centroids.means": "centroids"}
    for local_heads, count, window in ((2, 4, 8), (1, 8, 6), (1, 1, 80)):
        print(f"local heads: {local_heads}, clusters: {count}, window: {window}")
        page = RoutingAttention(32, 4, local_heads, count, window)
        sizes = {"local_heads": local_heads, "num_clusters": count, "window": window}
        library = kinformer.layer("routing", 32, num_heads=4, **sizes)
        proofs.compare(page, library, names, torch.randn(2, 40, 32), page.step)
        x = torch.randn(2, 40, 32, requires_grad=True)
        library.inner.centroids._sums = None
        _, state = library(x, return_state=True)
        k = F.normalize(page.heads(x, page.routed, 2)[0], dim=-1)
        loss = (k - page.centroids[torch.arange(4 - local_heads)[:, None], clusters(k, page.centroids)]).square()
        proofs.equal("the loss", 1e-4 * loss.mean((1, 3)).sum(1), state.aux)
        library.inner.centroids.learn(lambda total: total)
        proofs.equal("centroids after a step", moved(page.centroids, k), library.inner.centroids.means)


def train():
    """Train on the page, and move the centroids: faster than 0.999, as there are few steps."""

    class Learning(RoutingAttention):
        def forward(self, x):
            if self.training:
                k = F.normalize(self.heads(x, self.routed, 2)[0], dim=-1).detach()
                self.centroids.copy_(moved(self.centroids, k, 0.9))
            return super().forward(x)

    return proofs.train(lambda: Learning(64, 4, 2, 6, 16), __file__).eval()


def draw(figure, model):
    """The clusters of a trained head on the two main axes of its keys, and the pairs that it sees."""
    text = "A cluster can hold half of the text. The paper balances: every centroid takes the w tokens"
    x = (model.embed(torch.tensor(list(text.encode()))) + model.position.weight[: len(text)])[None]
    layer = model.layers[0]
    k = F.normalize(layer.heads(model.norms[0](x), layer.routed, 2)[0], dim=-1).detach()
    cluster = clusters(k, layer.centroids)
    sphere, *masks = figure.subplots(1, 3, width_ratios=[1.4, 1, 1])
    axes = torch.linalg.svd(k[0, 0] - k[0, 0].mean(0), full_matrices=False)[2][:2].T
    for number in range(6):
        colour = f"C{number}"
        for place in (k[0, 0, cluster[0, 0] == number] @ axes).tolist():
            sphere.plot(*place, ".", color=colour, alpha=0.6)
        sphere.plot(*(layer.centroids[0, number] @ axes).tolist(), "x", color=colour, markersize=9, markeredgewidth=2)
    sphere.set(title="keys and centroids (x)", xlabel="first main axis", ylabel="second")
    for head, panel in enumerate(masks):
        near = torch.where(seen(cluster, 6, 16)[0, head], cluster[0, head][:, None].float(), math.nan)
        panel.imshow(near, cmap="tab10", vmin=0, vmax=9)
        panel.set(title=f"head {head}, by cluster", xlabel="key", ylabel="query")


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
