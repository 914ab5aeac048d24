"""An implementation that is unknown, or cannot do what is asked, is refused when the mixer or the model is built."""

import pytest

import kinformer
from kinformer.inputs.tokens import ExtraTokens
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.recurrent import LSTM
from kinformer.parts.patterns.sequence import Window
from kinformer.runtime.errors import KinformerError


@pytest.mark.parametrize("mixer", [LinearAttention, LSTM])
def test_unknown_names(mixer):
    with pytest.raises(KinformerError, match=rf"impl of the mixer '{mixer.Config.kind}': 'chunky' is not one of"):
        mixer.Config(impl="chunky")


@pytest.mark.parametrize("impl", ["sdpa", "flex"])
@pytest.mark.parametrize("change", [{"global_tokens": 2}, {"global_input": ExtraTokens.Config(count=3)}])
def test_global_tokens_of_an_encoder(impl, change):
    settings = {"layers.*.mixer.impl": impl}
    kinformer.build("bert", recipe="tiny", vocab_size=19, set=settings)
    with pytest.raises(KinformerError, match=f"bidirectional: impl is '{impl}', which knows no log-sum-exps"):
        kinformer.build("bert", recipe="tiny", vocab_size=19, set=settings | change)


def test_global_tokens_in_a_long_input_beside_those_of_etc():
    with pytest.raises(KinformerError, match="has its global tokens in a global input"):
        kinformer.build("etc", recipe="tiny", vocab_size=19, set={"global_tokens": 2})


def test_sdpa_knows_bands_alone():
    settings = {"layers.*.mixer.impl": "sdpa", "layers.*.mixer.pattern": Window(window=3, dilations=(1, 2))}
    with pytest.raises(KinformerError, match="patterns but by distance alone"):
        kinformer.build("bert", recipe="tiny", vocab_size=19, set=settings)
