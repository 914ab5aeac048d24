"""Tiny models of transformers with random weights."""

import json

import torch
from torch.testing import assert_close

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
HYBRID = {
    "num_hidden_layers": 4,
    "initializer_range": 0.1,
    "head_dim": 16,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
KINDS: dict[str, tuple[str, dict]] = {
    "gpt2": (
        "GPT2",
        {
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "scale_attn_by_inverse_layer_idx": True,
            "attn_implementation": "eager",  # SDPA of transformers 5.0 does not scale by the layer
        },
    ),
    "llama": ("Llama", {"rope_parameters": ROPE}),
    "llama, linear scaling": ("Llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}),
    "llama, yarn": (
        "Llama",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "llama, yarn with a factor of DeepSeek": (
        "Llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16, "truncate": False}
            | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 4.0}
        },
    ),
    "llama 3": (
        "Llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
            | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        },
    ),
    "llama, dynamic": ("Llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}),
    "phi3": (
        "Phi3",
        {
            "sliding_window": 7,
            "original_max_position_embeddings": 32,
            "rope_parameters": ROPE
            | {"rope_type": "longrope", "partial_rotary_factor": 0.5}
            | {"short_factor": [1.0, 1.5], "long_factor": [2.0, 6.0]},
        },
    ),
    "smollm3": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {"rope_parameters": ROPE}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5,
            "rope_parameters": {"sliding_attention": ROPE | {"rope_theta": 90.0}}
            | {"full_attention": ROPE | {"rope_type": "linear", "factor": 2.0}},
            "num_hidden_layers": 4,
        },
    ),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"num_key_value_heads": 4}
        | {
            "kv_lora_rank": 12,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "num_key_value_heads": 4,
        }
        | {
            "rope_parameters": ROPE
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
            | {"mscale": 0.7, "mscale_all_dim": 0.7}
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"num_key_value_heads": 4}
        | {
            "kv_lora_rank": 12,
            "q_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "num_key_value_heads": 4,
        }
        | {"n_group": 1, "topk_group": 1},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    ),
    "kimi_linear": (
        "KimiLinear",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4}
        | {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_hidden_layers": 3}
        | {"n_group": 4, "topk_group": 2, "linear_head_dim": 8, "linear_num_heads": 2, "initializer_range": 0.1}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "granite": ("Granite", MULTIPLIED | {"attention_bias": True, "tie_word_embeddings": True}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MULTIPLIED
        | {"num_local_experts": 0, "shared_intermediate_size": 24, "layer_types": ["full_attention"] * 3}
        | {"position_embedding_type": "rope", "rope_parameters": ROPE, "mamba_n_heads": 8},
    ),
    "granitemoehybrid with mamba layers": (
        "GraniteMoeHybrid",
        MULTIPLIED
        | {"num_local_experts": 0, "shared_intermediate_size": 24, "initializer_range": 0.1, "mamba_n_heads": 8}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_d_state": 6}
        | {"mamba_n_groups": 2, "tie_word_embeddings": True},
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8, "rope_parameters": ROPE},
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 3}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0}
        | {"final_logit_softcapping": 5.0, "attn_implementation": "eager"},
    ),
    "gemma3_text": ("Gemma3Text", {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 12}),
    "qwen3_next": ("Qwen3Next", HYBRID | {"num_experts": 0}),
    "qwen3_next with experts": (
        "Qwen3Next",
        HYBRID
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0]}
        | {"shared_expert_intermediate_size": 20},
    ),
    "qwen3_5_text": ("Qwen3_5Text", HYBRID),
    "olmo_hybrid": (
        "OlmoHybrid",
        {"num_hidden_layers": 4, "initializer_range": 0.1, "rope_parameters": ROPE}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
}
UNKNOWN = {
    "GPT2": ("num_key_value_heads", "intermediate_size"),
    "GPTNeoX": ("num_key_value_heads",),
    "OPT": ("num_key_value_heads", "intermediate_size"),
    "Bloom": ("num_key_value_heads", "intermediate_size", "max_position_embeddings"),
    "Mpt": ("num_key_value_heads", "intermediate_size", "max_position_embeddings"),
}
"""The sizes that a model's config does not have under that name."""
MODELS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM", "Qwen3_5Text": "Qwen3_5ForCausalLM"}
MAIN = ("gpt2", "llama")
HYBRIDS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid")
EXPERTS = ("mixtral", "glm4_moe", "kimi_linear", "qwen3_moe", "deepseek_v2", "deepseek_v3", "qwen3_next with experts")
GRANITES = ("granite", "granitemoehybrid", "granitemoehybrid with mamba layers")
IMPORTED_ONLY = (
    *EXPERTS,
    *GRANITES,
    "lfm2",
    "phi3",
    "smollm3",
    "olmo2",
    "olmo3",
    "llama, dynamic",
    "opt",
    "bloom",
    "mpt",
    "gemma",
    "gemma2",
    "gemma3_text",
    *HYBRIDS,
)
PATCHED = tuple(kind for kind in KINDS if kind not in IMPORTED_ONLY)
"""The models whose attention :func:`kinformer.interop.patch` can replace."""


def new_model(kind="gpt2", **changes):
    """A random model in eval mode; biases and norms are random as well.

    Decays are near 1, as trained ones: those of a new model leave the token itself alone, whose rounding the norm of
    heads magnifies. Norms that multiply by 1 + w have weights that it can be added to without rounding.
    """
    import transformers

    prefix, settings = KINDS[kind]
    sizes = {name: value for name, value in SIZES.items() if name not in UNKNOWN.get(prefix, ())}
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**sizes | settings | changes)
    model = getattr(transformers, MODELS.get(prefix, f"{prefix}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3.0)
            elif kind in HYBRIDS and "norm" in name:
                parameter.copy_(1 + parameter).sub_(1)
    return model


def tokens(time=20, rows=2, seed=3):
    return torch.randint(1, VOCABULARY, (rows, time), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, **options).logits


def assert_equal(left, right, limit=1e-5):
    assert_close(left, right, atol=limit * float(right.detach().abs().max()), rtol=0)


def byte_tokenizer(folder):
    """Save a tokenizer of bytes, whose 256 ids are the bytes in the order of its alphabet."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def blank_tokenizer(folder, begins=True, **settings):
    """Save a tokenizer as LLaMA 2 has it, and its ``settings``: a blank is a sign of the vocabulary, decoding drops the
    first one, unknown letters are bytes, and a text ``begins`` with <s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz.\n"
    blank = "\N{LOWER ONE EIGHTH BLOCK}"
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), blank, *letters, *(blank + one for one in letters)]
    merges = [(blank, one) for one in letters]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(blank), normalizers.Replace(" ", blank)])
    parts = [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(special)
    if begins:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | named | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return made
