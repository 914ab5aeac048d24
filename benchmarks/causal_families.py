"""Which causal models of the library transformers hold their laws? All families that can be built small, by `verify`.

    python benchmarks/causal_families.py                    # all families, each in a process of its own
    python benchmarks/causal_families.py --only llama mamba # some of them; writes nothing
    python benchmarks/causal_families.py --again xlm xlnet  # some of them, in the place of those in the result file

A family is built of its config class with small sizes and random weights, in float32 and eval mode, and judged by the
laws of ``kinformer.interop.proof`` at 2 to 13 tokens: causality, cache = no cache, padding, packing, rows alone and in
another order. What cannot be built so is listed with the reason. A family that takes more than ``--seconds`` ends.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from common import RESULTS, arguments, prepare, save, show
from kinformer.interop.proof import LAWS, Theirs, judge

LENGTH, MOST_PARAMETERS = 13, 20_000_000
WIDTH, HEADS, LAYERS, INNER = 32, 4, 4, 48
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), 61),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "dim_model"), WIDTH),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "lru_width", "embedding_dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), INNER),
    **dict.fromkeys(("feed_forward_size", "dff", "shared_intermediate_size", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("mlp_hidden_size", "dim_ff", "block_ff_dim", "intermediate_size_mlp"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_shared_intermediate_size"), 24),
    **dict.fromkeys(("head_dim", "attention_head_size", "kv_channels", "v_head_dim", "d_kv", "mamba_headdim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "n_activated_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "local_attention"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_num_heads", "n_mamba_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "chunk_size", "mamba_chunk_size", "ssm_chunk_size"), 4),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    **dict.fromkeys(("hidden_size_per_layer_input", "index_head_dim", "index_topk", "altup_num_inputs"), 8),
    **dict.fromkeys(("index_n_heads", "laurel_rank"), 4),
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "block_size": 4,
    "num_random_blocks": 1,
    "is_decoder": True,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small sizes by the names that configs have for them; a family takes those that it knows."""
LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
BLT_PART: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": INNER,
    "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "blt": {
        **{f"{part}_config": BLT_PART | {"hidden_size_global": WIDTH} for part in ("encoder", "decoder")},
        **{f"{part}_config": BLT_PART for part in ("global", "patcher")},
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 61,
        "encoder_hash_byte_group_size": [3, 4],
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), HEADS),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank"), 16),
        **dict.fromkeys(("swa_head_dim", "swa_v_head_dim"), 8),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_qk_rope_head_dim"), 4),
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "fuyu": {
        "text_config": {
            "model_type": "persimmon", "vocab_size": 61, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "intermediate_size": INNER, "max_position_embeddings": 64,
        }
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": LINEAR_AND_FULL},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": LINEAR_AND_FULL, "linear_head_dim": 8, "linear_num_heads": HEADS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "mpt": {"n_heads": HEADS, "d_model": WIDTH},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "openai-gpt": {"n_inner": None},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "ngram_vocab_size_base": 61, "split_ngram_parts": 1, "hc_lowrank": 8,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "num_key_value_heads": 1},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "local"]},
    "xlm": {"causal": True},
    "xlnet": {"d_inner": INNER, "mem_len": 64, "attn_type": "uni"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "head_dim": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a family needs besides; XLM and XLNet are bidirectional unless told otherwise."""


def build(family: str) -> Any:
    """Return a small model of ``family`` with random weights; what cannot be built raises."""
    model_class, full = getattr(transformers, FAMILIES[family]), CONFIG_MAPPING[family]()
    if any(hasattr(full, name) for name in ("vision_config", "audio_config", "audio_encoder")):
        raise ValueError("reads more than text; its text model is a family of its own where it is one")
    if family.endswith("_assistant"):
        raise ValueError("reads the keys and values of the model that it assists")
    kind = model_class.config_class or CONFIG_MAPPING[family]
    default = kind()
    known = set(inspect.signature(kind.__init__).parameters) | set(vars(default)) | set(kind.attribute_map)
    wanted = SIZES | ({"num_key_value_heads": HEADS, "head_dim": 4} if "qk_rope_head_dim" in known else {})
    sizes = {
        name: value
        for name, value in wanted.items()
        if name in known and (name == "head_dim" or _of(default, name) is not None)
    }
    config = kind(**sizes | CHANGES.get(family, {}))
    with torch.device("meta"):
        count = sum(one.numel() for one in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"has {count:,} parameters at these sizes")
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def _of(config: Any, name: str) -> Any:
    """Return a setting of ``config``; 0 for one that it has not, or has for every layer."""
    try:
        return getattr(config, name, 0)
    except Exception:
        return 0


def judged(family: str) -> dict[str, Any]:
    """Return the verdicts on ``family``, or why it was not judged."""
    try:
        model = build(family)
        subject = Theirs(model)
        with torch.no_grad():
            subject(torch.arange(3, 12)[None])
    except Exception as error:
        return {"built": False, "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    verdicts = judge(subject, LENGTH)
    facts = {one.law: {"holds": one.holds, "difference": one.difference, "case": one.case} for one in verdicts}
    return {"built": True, "laws": facts}


def in_process(family: str, seconds: float) -> dict[str, Any]:
    """Return :func:`judged` of a fork of this process, which ends after ``seconds``."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            theirs.send(judged(family))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else {"built": False, "reason": f"took more than {seconds:g} s"}
    except EOFError:
        return {"built": False, "reason": "its process ended"}
    finally:
        process.kill()
        process.join()


def word(verdict: dict[str, Any]) -> str:
    """Return a verdict in a word: ``raises`` where the call itself does."""
    if verdict["holds"] is None:
        return "-" if verdict["difference"] is None else f"{verdict['difference']:.0e}"
    if verdict["holds"]:
        return "holds"
    return "raises" if verdict["difference"] is None else "BREAKS"


def retained() -> dict[str, Any]:
    """Return the verdicts of the result file, which this version of transformers must have given."""
    result = json.loads((RESULTS / "causal_families.json").read_text(encoding="utf-8"))
    if result["transformers"] != transformers.__version__:
        raise SystemExit(f"the file is of transformers {result['transformers']}; judge all families.")
    return {name: result["families"][name] for name in FAMILIES}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="families; all if not given")
    parser.add_argument("--again", nargs="*", default=[], help="families to judge again; the file keeps the others")
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that one family may take")
    options = prepare(parser)
    torch.set_num_threads(options.threads or 1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = options.only or options.again or (["gpt2", "llama"] if options.quick else list(FAMILIES))
    found = retained() if options.again else {}
    for name in names:
        found[name] = in_process(name, options.seconds)
        print(
            name,
            {law: word(one) for law, one in found[name].get("laws", {}).items()} or found[name]["reason"],
            flush=True,
        )
    laws = (*LAWS, "bfloat16")
    built = {name: one["laws"] for name, one in found.items() if one["built"]}
    show(
        "causal families of transformers",
        ("family", *laws),
        [[n, *(word(v[law]) for law in laws)] for n, v in built.items()],
    )
    counts = {law: dict(Counter(word(one[law]) for one in built.values())) for law in LAWS}
    print(f"built {len(built)} of {len(found)}; {counts}")
    if not options.only:
        result = {"transformers": transformers.__version__, "length": LENGTH, "counts": counts, "families": found}
        save(options, "causal_families", result)


if __name__ == "__main__":
    main()
