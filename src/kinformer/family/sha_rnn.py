"""SHA-RNN: LSTMs with one head of attention, in one layer, over a long memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(dim: int, depth: int, memory: int, dropout: float = 0.0, vocab_size: int = 256) -> Recipe:
    """Return the recipe of ``depth`` layers, of which the last but one attends."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import Boom
        from kinformer.blocks.initialise import Initialisation
        from kinformer.blocks.sha_rnn import ShaRnnLayer
        from kinformer.heads.language import LanguageModelHead
        from kinformer.inputs.tokens import Tokens
        from kinformer.mixers.lstm import LSTM
        from kinformer.mixers.single_head import SingleHead
        from kinformer.models.decoder import Decoder
        from kinformer.positions.none import NoPosition

        boom = Boom.Config(hidden_dim=4 * dim, dropout=dropout)
        layer = ShaRnnLayer.Config(mixer=LSTM.Config(), feed_forward=boom, dropout=dropout)
        layers = [layer] * depth
        layers[-2] = layer.replace(attention=SingleHead.Config(memory=memory, dropout=dropout))
        return Decoder.Config(
            input=Tokens.Config(vocab_size=vocab or vocab_size),
            dim=dim,
            layers=tuple(layers),
            position=NoPosition.Config(),
            head=LanguageModelHead.Config(tied=True, bias=True),
            norm=None,
            dropout=dropout,
            initialisation=Initialisation(std=0.1 * dim**-0.5, residual="plain"),
        )

    return recipe


MEMBER = Member(
    name="sha-rnn",
    title="SHA-RNN (single headed attention RNN)",
    paper="Merity 2019, Single Headed Attention RNN: Stop Thinking With Your Head (arXiv 1911.11423)",
    year=2019,
    axes=("recurrence", "memory", "projection"),
    causal=True,
    growth="window",
    departures=(
        "every query sees the same number of past tokens, counted by positions; the authors cut the memory to its last "
        "max - segment slots when a segment begins, so that later tokens of a segment see more than earlier ones",
        "AdamW unless `optimizer` lamb is given, with which the authors train",
        "no dropout unless asked for, but in the recipe paper",
    ),
    exact_limit="memory >= length: attention over everything; without attention a stack of LSTMs",
    needs={"segments": True},
    parity=("the author's code (tests/blocks/test_sha_rnn.py)",),
    layer=2,
    use_when="you want a recurrent model with a little attention on one processor",
    avoid_when="long sequences are to be trained in parallel: its recurrence goes token by token",
    recipes={
        "tiny": _recipe(32, 2, memory=8),
        "small": _recipe(256, 4, memory=1024),
        "benchmark": _recipe(256, 4, memory=1024),
        "paper": _recipe(1024, 4, memory=5000, dropout=0.1, vocab_size=205),
    },
)
