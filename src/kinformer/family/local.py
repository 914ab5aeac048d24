"""Sliding window: every token sees the last few, and a state of constant size remembers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.core.parts import PatternConfig
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, window: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.patterns.local import Local
        from kinformer.positions.rope import Rope

        return decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(
                num_heads=shape.num_heads, position=Rope.Config(), pattern=Local.Config(window=window)
            ),
        )

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.initialise import Initialisation
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.norms import RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.patterns.local import Local
    from kinformer.positions.none import NoPosition
    from kinformer.positions.rope import Rope
    from kinformer.projections.grouped import Grouped

    norm = RMSNorm(eps=1e-5)
    mixer = SoftmaxAttention.Config(
        num_heads=32,
        projection=Grouped.Config(num_kv_heads=8, bias=False),
        position=Rope.Config(),
        pattern=Local.Config(window=4096),
        bias=False,
    )
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=SwiGLU.Config(hidden_dim=14336), norm=norm)
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 32000),
        dim=4096,
        layers=(layer,) * 32,
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(),
    )


LONGEST_WINDOW = 32768
"""The texts on which Longformer's authors evaluate have 32,256 characters."""
DILATED_HEADS = 2
PHASES = 5


def _windows(depth: int, phase: int) -> list[int]:
    """Keys that each layer of Longformer's language model sees in a phase (from 0): 32 in the lowest and 8192 in the
    highest layer in the first, twice as many in every later one."""
    return [min(2 ** (5 + round(8 * layer / (depth - 1)) + phase), LONGEST_WINDOW) for layer in range(depth)]


def _longformer(depth: int, dilations: tuple[int, ...], dropout: float) -> Recipe:
    """Longformer's language model of characters (Beltagy et al. 2020, section 4 and table 12) as its last phase leaves
    it; ``dilations``: the lowest of the layers in which two heads see every second, every third and every fourth
    token."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.patterns.dilated import Dilated
        from kinformer.patterns.local import Local
        from kinformer.positions.xl import TransformerXL

        shape = ModelShape(512, depth, 8)
        mixer = SoftmaxAttention.Config(num_heads=shape.num_heads, position=TransformerXL.Config(), dropout=dropout)
        config = decoder(shape, vocab or 256, mixer)
        layers = []
        for number, (layer, window) in enumerate(zip(config.layers, _windows(depth, PHASES - 1), strict=True)):
            gap = 1 + sum(number >= lowest for lowest in dilations)
            plain, dilated = (1,) * (shape.num_heads - DILATED_HEADS), (gap,) * DILATED_HEADS
            pattern: PatternConfig = Local.Config(window=window)
            if gap > 1:
                pattern = Dilated.Config(window=window, dilations=plain + dilated)
            layers.append(layer.replace(mixer=mixer.replace(pattern=pattern), dropout=dropout))
        return config.replace(layers=tuple(layers), dropout=dropout)

    return recipe


def _phases(depth: int, steps: tuple[int, ...]) -> dict[str, object]:
    """Return the training of :func:`_longformer` in five phases (table 12): windows and rows twice as long in each,
    half the learning rate, which rises again over a tenth of the phase, for 10,000 steps at most."""
    lengths, rows = (2048, 4096, 8192, 16384, 23040), (32, 32, 16, 16, 16)
    stages: list[dict[str, object]] = []
    for phase, (count, length, batch) in enumerate(zip(steps, lengths, rows, strict=True)):
        rate = {"lr": 2.5e-4 / 2**phase, "warmup": min(count // 10, 10_000)}
        windows = {f"layers.{layer}.mixer.pattern.window": item for layer, item in enumerate(_windows(depth, phase))}
        stages.append({"steps": count, "length": length, "batch_size": batch, **rate, "set": windows})
    last = stages[-1]
    stages[-1] = {name: last[name] for name in ("lr", "warmup")}
    return {
        "steps": sum(steps),
        "length": last["length"],
        "batch_size": last["batch_size"],
        "stages": tuple(stages),
        "schedule": "constant",
        "lr": 2.5e-4,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "clip": 0.25,
    }


MEMBER = Member(
    name="local",
    title="Local attention (sliding window)",
    paper="Jiang et al. 2023, Mistral 7B (arXiv 2310.06825); Liu et al. 2018 (arXiv 1801.10198) for local attention",
    year=2023,
    axes=("pattern", "position"),
    causal=True,
    growth="window",
    departures=(
        "in all recipes but those of papers, layer norm, GELU and a key head per head, so that only window and "
        "positions differ from the plain decoder",
        "paper-longformer: windows grow from layer to layer by powers of two (the paper names the lowest and the "
        "highest), and count the keys that a token sees, itself included; its authors never released this model's "
        "code, and the sizes, the phases and their rates are recalled from the paper's table, not held to it again",
    ),
    exact_limit="window >= length",
    parity=("openai/sparse_attention: the mask of its window (tests/patterns/test_published.py)",),
    results=("sparse",),
    use_when="the recent past decides, in texts of any length and with a constant state",
    avoid_when="a token far beyond the windows of all layers must be recalled exactly",
    training={
        "paper-longformer": _phases(12, (430_000, 50_000, 50_000, 35_000, 5_000)),
        "paper-longformer-large": _phases(30, (350_000, 25_000, 10_000, 5_000, 5_000)),
    },
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), window=8),
        "small": _recipe(ModelShape(256, 4, 4), window=256),
        "benchmark": _recipe(ModelShape(256, 4, 4), window=256),
        "paper": _paper,
        "paper-longformer": _longformer(12, (6, 8, 10), 0.2),
        "paper-longformer-large": _longformer(30, (15, 20, 25), 0.4),
    },
)
