"""Patched models stream: generation with a cache is generation without one, and states do not grow."""

import copy
import inspect

import pytest
import torch
from transformers import LlamaForCausalLM

from kinformer.interop import patch
from kinformer.nn import states
from kinformer.runtime.errors import KinformerError
from tests.interop.peers import MAIN, VOCABULARY, assert_equal, logits, new_model, tokens

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The name of the cache among arguments and outputs of models."""
MIXERS = {
    "softmax": {},
    "local": {"set": {"pattern.window": 6}},
    "linear-transformer": {},
    "gated-deltanet": {},
    "transformer-xl": {"set": {"segment": 4, "memory": 8}},
}
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 8},
    "beams": {"do_sample": False, "num_beams": 3},
    "several beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
}


def generate(model, ids, **options):
    torch.manual_seed(1)
    return model.generate(ids, max_new_tokens=10, **{"do_sample": False} | options)


def left_padded():
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :5] = 0
    return tokens(9) * mask, mask


@pytest.mark.parametrize("layers", [[0], [1, 2], "all"], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("kind", MAIN)
def test_greedy_with_and_without_cache_and_padding(kind, mixer, layers):
    model = patch(new_model(kind), mixer, layers, **MIXERS[mixer])
    ids, mask = left_padded()
    streamed = generate(model, ids, attention_mask=mask)
    assert torch.equal(streamed, generate(model, ids, attention_mask=mask, use_cache=False))
    assert torch.equal(streamed[1:, 5:], generate(model, ids[1:, 5:]))


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", MAIN)
def test_every_way_of_generating(kind, options):
    model = patch(new_model(kind), "gated-deltanet", [0, 1])
    ids, mask = left_padded()
    streamed = generate(model, ids, attention_mask=mask, **options)
    assert torch.equal(streamed, generate(model, ids, attention_mask=mask, use_cache=False, **options))


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("layers", [[0], [1], "all"], ids=str)
def test_other_models_and_their_windows(kind, layers):
    model = patch(new_model(kind), "linear-transformer", layers)
    ids, mask = left_padded()
    streamed = generate(model, ids, attention_mask=mask)
    assert torch.equal(streamed, generate(model, ids, attention_mask=mask, use_cache=False))


def test_eager_attention_beside_patched_layers():
    model = patch(new_model("llama", attn_implementation="eager"), "gated-deltanet", [0])
    ids, mask = left_padded()
    streamed = generate(model, ids, attention_mask=mask)
    assert torch.equal(streamed, generate(model, ids, attention_mask=mask, use_cache=False))


@pytest.mark.parametrize("kind", MAIN)
def test_chunks_of_any_length_and_a_copied_cache(kind):
    model = patch(new_model(kind), "gated-deltanet", [0, 2])
    ids = tokens(20)
    want = logits(model, ids)
    with torch.no_grad():
        first = model(ids[:, :7], use_cache=True)
        fork = copy.deepcopy(first[CACHE])
        second = model(ids[:, 7:19], **{CACHE: first[CACHE]})
        third = model(ids[:, 19:], **{CACHE: second[CACHE]})
        again = model(ids[:, 7:], **{CACHE: fork})
    assert_equal(torch.cat([first.logits, second.logits, third.logits], dim=1), want)
    assert_equal(again.logits, want[:, 7:])
    assert third[CACHE].get_seq_length() == 20


def test_states_are_as_large_after_many_tokens():
    model = patch(new_model("llama", max_position_embeddings=600), "gated-deltanet", [0, 2])
    cache, sizes = None, []
    for _ in range(3):
        with torch.no_grad():
            cache = model(tokens(100), **{CACHE: cache}, use_cache=True)[CACHE]
        sizes.append([cache.layers[index].nbytes for index in (0, 2)])
    assert sizes[0] == sizes[1] == sizes[2] and sizes[0][0] > 0
    assert cache.layers[1].keys.shape[2] == 300


def test_rows_of_the_cache_are_selected_and_repeated():
    model = patch(new_model("llama"), "gated-deltanet", [0, 2])
    ids = tokens(12)
    want = logits(model, ids)[:, 8:]
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        with torch.no_grad():
            cache = model(ids[:, :8], use_cache=True)[CACHE]
            change(cache)
            assert_equal(model(ids[rows, 8:], **{CACHE: cache}).logits, want[rows])


@pytest.mark.parametrize("mixer", MIXERS)
def test_crop_takes_tokens_back_or_says_that_it_cannot(mixer):
    model = patch(new_model("llama"), mixer, [0, 1], **MIXERS[mixer])
    ids = tokens(16)
    want = logits(model, ids)
    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True)[CACHE]
        model(ids[:, 9:10], **{CACHE: cache})
        assert cache.layers[0].is_croppable == (mixer == "softmax")
        if mixer != "softmax":
            with pytest.raises(KinformerError, match="cannot be rewound by 3 tokens"):
                copy.deepcopy(cache).crop(-3)
        cache.crop(0)
        for layer in cache.layers[:2]:
            layer.activate_past_recording()
        model(ids[:, 10:14], **{CACHE: cache})
        cache.crop(-3)  # within the recorded chunk
        assert cache.get_seq_length() == 11
        assert_equal(model(ids[:, 11:], **{CACHE: cache}).logits, want[:, 11:])
        cache.crop(-cache.get_seq_length())
        assert cache.get_seq_length() == 0
        assert_equal(model(ids, **{CACHE: cache}).logits, want)


def test_padding_is_not_taken_back_as_if_it_were_tokens():
    model = patch(new_model("llama"), "softmax", [0])
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    with torch.no_grad():
        cache = model(tokens(9), attention_mask=mask, use_cache=True)[CACHE]
        want = model(tokens(9)[:, :8], attention_mask=mask[:, :8], use_cache=True)[CACHE]
        cache.crop(-1)
        assert states.difference(cache.layers[0].state, want.layers[0].state) < 1e-6
        cache = model(tokens(9), attention_mask=mask, use_cache=True)[CACHE]
        later = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        model(tokens(1), attention_mask=later, **{CACHE: cache})
    with pytest.raises(KinformerError, match="cannot be rewound by 2 tokens"):
        cache.crop(-2)


@pytest.mark.parametrize("mixer", ["softmax", "gated-deltanet"])
def test_speculative_generation(mixer):
    model = patch(new_model("llama"), mixer, [0, 2])
    ids = tokens(9, rows=1)
    want = generate(model, ids)
    end = VOCABULARY  # an id that never comes, without which transformers 5.0 looks up no prompt
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3, eos_token_id=end), want)
    helper = new_model("llama")
    assert torch.equal(generate(model, ids, assistant_model=helper), want)


def test_caches_that_do_not_fit_are_one_sentence():
    model = new_model("llama")
    with torch.no_grad():
        cache = model(tokens(), use_cache=True)[CACHE]
    plain = copy.deepcopy(model)
    patch(model, "gated-deltanet", [1])
    with pytest.raises(KinformerError, match="layer 1 of the cache holds keys of the model before it was patched"):
        model(tokens(1), **{CACHE: cache})
    with pytest.raises(KinformerError, match="leave cache_implementation out"):
        generate(model, tokens(), cache_implementation="static")
    with torch.no_grad():
        cache = model(tokens(), use_cache=True)[CACHE]
    with pytest.raises(KinformerError, match="filled by a patched model"):
        plain(tokens(1), **{CACHE: cache})
