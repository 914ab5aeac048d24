# # Speech: connectionist temporal classification over four encoders
#
# *Paper: Katharopoulos, Vyas, Pappas, Fleuret: Transformers are RNNs (2020), arXiv 2006.16236, section 4.3; loss:
# Graves, Fernández, Gomez, Schmidhuber: Connectionist Temporal Classification (2006). Members: `speech-softmax`,
# `speech-linear`, `speech-lsh`, `speech-lstm`. Measured: speech, speech_speaker.*
#
# **Problem.** A transcript tells which symbols were spoken, but not when. A recording of 3 seconds has 300 frames and
# perhaps 10 symbols, so no frame has a label.
#
# **Idea.** The encoder gives each position probabilities of all symbols and of a blank (no symbol). Many paths of
# symbols and blanks spell the same transcript $y$: merge repeated symbols, then drop the blanks. CTC maximises the sum
# of the probabilities of these paths:
#
# $$ p(y) = \sum_{\pi\, \mathrm{spells}\, y} \prod_t p_t(\pi_t) $$

import math

import torch
from torch import nn
from torch.nn import functional as F

# ## Filterbank frames
#
# A frame is 25 ms of sound, every 10 ms. Its spectrum is summed under triangles, evenly spaced in mel, the ear's scale
# of pitch. Logarithms turn loudness into an offset, and the normalisation of each filter over the recording removes it.


def log_mel(sound, rate, mels):
    """sound [samples] -> [frames, mels]."""
    size, hop = rate // 40, rate // 100
    points = 2 ** math.ceil(math.log2(size))
    power = torch.fft.rfft(sound.unfold(0, size, hop) * torch.hann_window(size), points).abs() ** 2
    edges = 700 * (10 ** torch.linspace(0, math.log10(1 + rate / 1400), mels + 2) - 1)
    low, mid, high = edges[:-2], edges[1:-1], edges[2:]
    hertz = torch.linspace(0, rate / 2, points // 2 + 1)[:, None]
    triangles = torch.minimum((hertz - low) / (mid - low), (high - hertz) / (high - mid)).clamp(min=0)
    x = (power @ triangles).clamp(min=1e-6).log()
    return (x - x.mean(0)) / x.std(0, correction=0).clamp(min=0.1)


# ## Four mixers
#
# Every position may see the whole recording, so nothing is causal. The first mixer is exact softmax attention (the $1 /
# \sqrt{d}$ keeps scores near 1). The second replaces the exponential by $\phi(q) \cdot \phi(k)$ with $\phi =
# \mathrm{elu} + 1$, which must be positive so that the normaliser cannot vanish: sums over keys do not depend on the
# query, so the cost is linear. It never equals softmax attention.


def softmax(q, k, v):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def linear(q, k, v, eps=1e-6):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(2)[..., None] + eps)


class Attention(nn.Module):
    def __init__(self, dim, num_heads, form):
        super().__init__()
        self.num_heads, self.form = num_heads, form
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.form(q, k, v).transpose(1, 2).flatten(2))


# The third is Reformer's attention as published. Tokens are sorted by their hash and cut into chunks of $m$; a query
# sees its chunk and the one before. The first chunk of a round sees the last one of the round before it. Rounds are
# weighed by their normalisers, as if they were one softmax. With one chunk it is exact attention with shared queries
# and keys.


class Hashed(nn.Module):
    def __init__(self, dim, num_heads, buckets, chunk, rounds):
        super().__init__()
        self.chunk, self.num_heads = chunk, num_heads
        self.qv, self.out = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.register_buffer("rotations", torch.randn(num_heads, dim // num_heads, rounds, buckets // 2))

    def forward(self, x):
        q, v = self.qv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        k = q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt() / math.sqrt(q.shape[-1])
        turned = torch.einsum("bhtd,hdrc->bhrtc", q, self.rotations)
        order = torch.cat([turned, -turned], -1).argmax(-1).argsort(dim=-1, stable=True)
        number = order.argsort(-1) // self.chunk  # the chunk of each token, in each round
        query, key, last = number[..., :, None], number[..., None, :], number.max()
        seen = (query == key).double() + (query == key + 1) + ((query == 0) & (key.roll(1, 2) == last))
        scores = (q @ k.transpose(-2, -1)).masked_fill(torch.eye(x.shape[1], dtype=torch.bool), -1e5)
        scores = scores[:, :, None] + seen.log().to(q)  # a key seen twice counts twice
        rounds = scores.logsumexp(-1, keepdim=True).softmax(2)
        return self.out((rounds * (scores.softmax(-1) @ v[:, :, None])).sum(2).transpose(1, 2).flatten(2))


# The fourth is an LSTM in both directions, whose loop over time stands with the proof. Its memory is one vector $c_t =
# f_t \odot c_{t-1} + i_t \odot g_t$, and all gates read the output of the step before, so the steps cannot be computed
# at once.


# ## The loss
#
# The sum has exponentially many paths, but paths meet. Write the transcript with blanks between and around its symbols,
# $s = (\epsilon, y_1, \epsilon, y_2, \ldots, \epsilon)$. At each position a path stays, moves on by one, or skips a
# blank, unless the blank separates two equal symbols (they would merge). $\alpha_i$ sums all paths that stand at $s_i$.
# Sums of products vanish in floating point, so the loop adds logarithms.


def ctc(log_p, transcript):
    """log_p [time, classes] with the blank 0, transcript: a list of classes -> -log p(transcript)."""
    s = [0]
    for symbol in transcript:
        s += [symbol, 0]
    never = log_p.new_tensor(-1e30)  # the gradient of a sum of -inf alone would be nan
    alpha = [log_p[0, s[i]] if i < 2 else never for i in range(len(s))]
    for t in range(1, len(log_p)):
        before, alpha = alpha, []
        for i in range(len(s)):
            ways = before[max(0, i - 1) : i + 1]
            if i > 1 and s[i] != 0 and s[i] != s[i - 2]:
                ways = [before[i - 2], *ways]
            alpha.append(torch.stack(ways).logsumexp(0) + log_p[t, s[i]])
    return -torch.stack(alpha[-2:]).logsumexp(0)


def read(log_p):
    """Return the symbols of the most probable path: merge repeated ones, drop blanks."""
    return [symbol for symbol in log_p.argmax(-1).unique_consecutive().tolist() if symbol]


# ## Costs, and when to take it
#
# Of $T$ positions softmax compares $T^2$ pairs; hashes $2 m T$ a round; linear attention needs $2 d^2 T$ products a
# head; the LSTM $T$ steps one after the other. A recording is read at once, so no state is stored. CTC needs at least
# as many positions as symbols, plus one for each repetition, and it predicts symbols independently given the sound: no
# language model hides in it.
#
# The paper claims phoneme error rates of 5.1 % (softmax), 8.1 % (linear), 9.3 % (hashed) and 10.9 % (LSTM) on 80 hours
# of read news, and an epoch of linear attention 3.3 times as fast as softmax. On our result page "speech", with joined
# spoken digits, the LSTM errs least: 0.3 % of the digits, hashed attention 1.3 %, softmax 2.0 %, linear 4.0 %. A
# training step of 2,400 frames takes 63 ms (linear), 79 (LSTM), 111 (softmax) and 178 (hashed). A new speaker raises
# the errors of softmax to 21.6 % ("speech_speaker").
#
# Take softmax for short recordings, linear for long ones in little time, hashes for long ones with few errors, the LSTM
# for little data.

# --- proof ---
# The library's models with the same weights give the same logits and gradients for all four mixers; the filterbank and
# the loss are the library's, and the loss is the sum over all paths.


import itertools

import proofs

import kinformer


class LSTM(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inputs = nn.ModuleList([nn.Linear(dim, 2 * dim) for _ in range(2)])
        self.states = nn.ModuleList([nn.Linear(dim // 2, 2 * dim) for _ in range(2)])

    def run(self, x, direction):
        h = c = x.new_zeros(len(x), x.shape[2] // 2)
        outputs = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.inputs[direction](x[:, t]) + self.states[direction](h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)

    def forward(self, x):
        return torch.cat([self.run(x, 0), self.run(x.flip(1), 1).flip(1)], -1)


class Layer(nn.Module):
    def __init__(self, dim, mixer):
        super().__init__()
        self.mixer, self.norm1, self.norm2 = mixer, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Speech(nn.Module):
    """Two convolutions of stride 2 and layers: frames [batch, frames, mels] -> logits [batch, frames / 4, classes]."""

    def __init__(self, mels, dim, layers, classes, attends=True):
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Linear(3 * mels, dim), nn.Linear(3 * dim, dim)])
        self.layers, self.norm0, self.attends = nn.ModuleList(layers), nn.LayerNorm(dim), attends
        self.norm, self.head = nn.LayerNorm(dim) if attends else nn.Identity(), nn.Linear(dim, classes)

    def forward(self, frames):
        x = F.pad(frames, (0, 0, 3, -frames.shape[1] % 4))
        for convolution in self.convolutions:
            x = F.gelu(convolution(x.unfold(1, 3, 2).mT.flatten(2)))
        if self.attends:
            place = torch.arange(x.shape[1]).double()[:, None]
            angle = place * 10000 ** (-torch.arange(0, x.shape[2], 2).double() / x.shape[2])
            x = x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(x)
        x = self.norm0(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Windowed(nn.Module):
    """A model of the library, which reads windows of frames, called with the frames."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, frames):
        from kinformer.inputs.signals import windows

        return self.inner(torch.stack([windows(row, 7, 4) for row in frames]))


PARTS = {
    "mixer_residual.norm": "norm1",
    "feed_forward_residual.norm": "norm2",
    "feed_forward.up": "up",
    "feed_forward.down": "down",
    "mixer.out": "mixer.out",
}
MIXERS = {
    "softmax": {"mixer.projection.qkv": "mixer.qkv"},
    "linear": {"mixer.qkv": "mixer.qkv"},
    "lsh": {"mixer.qv": "mixer.qv", "mixer.hashes.rotations": "mixer.rotations"},
    "lstm": {
        f"mixer.rnn.{kind}_{gate}_l0{end}": f"{part}.{number}.{kind}"
        for number, end in enumerate(("", "_reverse"))
        for gate, part in (("ih", "inputs"), ("hh", "states"))
        for kind in ("weight", "bias")
    },
}


def proof():
    from kinformer.inputs.signals import Filterbank, normalised
    from kinformer.lab.tasks.speech import ctc_nats

    sound = torch.randn(4000)
    bank = Filterbank(8000, 16)
    bank.filters = bank.filters.double()
    theirs = normalised(bank(sound))
    proofs.equal("filterbank (float32 there)", log_mel(sound, 8000, 16), theirs, 1e-5)
    makers = {
        "softmax": lambda: Layer(32, Attention(32, 2, softmax)),
        "linear": lambda: Layer(32, Attention(32, 2, linear)),
        "lsh": lambda: Layer(32, Hashed(32, 2, 4, 4, 2)),
        "lstm": lambda: LSTM(32),
    }
    for name, make in makers.items():
        print(f"speech-{name}")
        page = Speech(40, 32, [make() for _ in range(2)], 29, name != "lstm")
        names = {"input.convolutions": "convolutions", "embedding_norm": "norm0", "head.output": "head"}
        names |= {} if name == "lstm" else {"norm": "norm"}
        parts = MIXERS[name] if name == "lstm" else PARTS | MIXERS[name]
        names |= {f"stack.layers.{i}.{a}": f"layers.{i}.{b}" for i in range(2) for a, b in parts.items()}
        library = Windowed(kinformer.build(f"speech-{name}", recipe="tiny"))
        names = {f"inner.{there}": here for there, here in names.items()}
        proofs.compare(page, library, names, torch.randn(2, 75, 40))
    log_p = torch.randn(2, 9, 5).log_softmax(-1).requires_grad_()
    transcripts = [1, 1, 3], [2, 4, 2]
    nats = torch.stack([ctc(row, symbols) for row, symbols in zip(log_p, transcripts, strict=True)])
    theirs = ctc_nats(log_p, torch.tensor([9, 9]), torch.tensor(transcripts), torch.tensor([3, 3]))
    proofs.equal("loss", nats, theirs)
    slopes = [torch.autograd.grad(x.sum(), log_p, retain_graph=True)[0] for x in (nats, theirs)]
    # The library normalises the logits first, so its gradient adds up to 0 at each position.
    proofs.equal("gradients of the loss", slopes[0] - log_p.exp() * slopes[0].sum(-1, keepdim=True), slopes[1])
    few = log_p[0, :5, :3].log_softmax(-1)
    spelled = [path for path in itertools.product(range(3), repeat=5) if merged(path) == [1, 2]]
    total = sum(math.prod(few[t, symbol].exp() for t, symbol in enumerate(path)) for path in spelled)
    print(f"{len(spelled)} of {3**5} paths spell [1, 2]")
    proofs.equal("sum over paths", ctc(few, [1, 2]), -total.log())


def merged(path):
    return [symbol for symbol, _ in itertools.groupby(path) if symbol]


RATE, MELS, LENGTH = 8000, 16, 6400
TONES = {1: (700, 700), 2: (2500, 2500), 3: (500, 3000), 4: (3000, 500)}
"""The first and last frequency of each symbol: low, high, rising, falling."""


def utterance():
    """Return 0.8 s of noise with two or three tones, [samples], and their symbols."""
    sound, symbols = 0.02 * torch.randn(LENGTH), torch.randint(1, 5, (int(torch.randint(2, 4, ())),)).tolist()
    begin = int(torch.randint(200, 900, ()))
    for symbol in symbols:
        length = int(torch.randint(900, 1500, ()))
        first, last = TONES[symbol]
        pitch = torch.linspace(first, last, length)
        sound[begin : begin + length] += (2 * math.pi * pitch.cumsum(0) / RATE).sin() * torch.hann_window(length)
        begin += length + int(torch.randint(200, 400, ()))
    return sound, symbols


def train():
    torch.manual_seed(0)
    model = Speech(MELS, 48, [Layer(48, Attention(48, 4, softmax)) for _ in range(2)], 5)
    sounds, transcripts = zip(*[utterance() for _ in range(300)], strict=True)
    frames = torch.stack([log_mel(sound, RATE, MELS) for sound in sounds])

    def loss():
        rows = torch.randint(250, (16,)).tolist()
        log_p = model(frames[rows]).log_softmax(-1).transpose(0, 1)
        targets = [torch.tensor(transcripts[row]) for row in rows]
        # This is the function `ctc`, faster.
        lengths = torch.full((16,), len(log_p)), torch.tensor([len(target) for target in targets])
        return F.ctc_loss(log_p, torch.cat(targets), *lengths)

    losses = proofs.fit(model, loss, 150, lr=3e-3)
    with torch.no_grad():
        heard = [read(row) for row in model(frames[250:])]
    right = sum(a == b for a, b in zip(heard, transcripts[250:], strict=True))
    print(f"tones: {losses[0]:.2f} nats a symbol at first, {losses[-1]:.2f} after {len(losses)} steps")
    print(f"{right} of 50 new recordings are transcribed without an error")
    return model


def draw(figure, model):
    """A recording, the model's probabilities, and all paths that spell its symbols, equally likely."""
    sound, symbols = utterance()
    frames = log_mel(sound, RATE, MELS)
    log_p = model(frames[None]).log_softmax(-1)[0].detach()
    names = ("-", "low", "high", "rising", "falling")
    picture, heard, paths = figure.subplots(1, 3)
    picture.imshow(frames.T, origin="lower", aspect="auto")
    picture.set(title="filterbank", xlabel="frame", ylabel="filter")
    heard.imshow(log_p.exp().T, origin="lower", aspect="auto", vmin=0, vmax=1)
    heard.set(title="after training", xlabel="position", yticks=range(5), yticklabels=names)
    # The slope of the loss is minus the share of the transcript's paths that pass through a symbol at a position.
    equal = torch.full_like(log_p, -math.log(5)).requires_grad_()
    shares = -torch.autograd.grad(ctc(equal, symbols), equal)[0]
    paths.imshow(shares.T, origin="lower", aspect="auto", vmin=0, vmax=1)
    paths.set(title="before training", xlabel="position", yticks=range(5), yticklabels=names)


if __name__ == "__main__":
    proofs.run(__file__, proof, train, draw)
