"""Write an exported folder as a GGUF file for llama.cpp (package gguf), with the matrices in F32, BF16 or Q8_0.

python examples/to_gguf.py exported/book book.gguf
python examples/to_gguf.py exported/book book.gguf Q8_0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NUL = "\N{LATIN CAPITAL LETTER A WITH MACRON}"
"""The sign of the byte 0, which stands in no text, in byte-level vocabularies."""
LLAMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def convert(folder: str | Path, file: str | Path, form: str = "F32") -> None:
    """Write the GGUF ``file`` of an exported ``folder``, its matrices as ``form`` (a name of
    ``gguf.GGMLQuantizationType``). Errors: ``ValueError`` for other models and tokenizers."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    if kind == "llama":
        plain = config["rope_parameters"]["rope_type"] == "default"
    else:
        plain = kind == "gpt2" and config["activation_function"] in ("gelu_new", "gelu_pytorch_tanh")
    if not plain:
        raise ValueError(
            f"{folder}: only a llama with plain rotary positions or a gpt2 with gelu_tanh can be converted."
        )
    writer = gguf.GGUFWriter(file, kind)
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if form == "F32" else f"MOSTLY_{form}"])
    heads = config["num_attention_heads" if kind == "llama" else "n_head"]
    kv_heads = config.get("num_key_value_heads", heads)
    writer.add_head_count(heads)
    if kind == "llama":
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(kv_heads)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        for add in (writer.add_rope_dimension_count, writer.add_key_length, writer.add_value_length):
            add(config["head_dim"])
    else:
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(config["n_inner"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, folder, config)
    names = LLAMA if kind == "llama" else GPT2
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            *before, last = name.split(".")
            numbers = [number for number, part in enumerate(before) if part.isdigit()]
            layer = f"blk.{before[numbers[0]]}." if numbers else ""
            theirs = names[".".join(before[numbers[0] + 1 :] if numbers else before)]
            if theirs in ("attn_q", "attn_k"):
                tensor = side_by_side(tensor, heads if theirs == "attn_q" else kv_heads)
            if ".c_" in name and last == "weight":  # GPT-2 stores products as [in, out]
                tensor = tensor.T
            tensor = np.ascontiguousarray(tensor, dtype=np.float32)
            matrix = tensor.ndim > 1 and theirs != "position_embd"  # llama.cpp adds positions in float32
            kind_of_data = gguf.GGMLQuantizationType[form if matrix else "F32"]
            data = gguf.quants.quantize(tensor, kind_of_data) if matrix else tensor
            writer.add_tensor(f"{layer}{theirs}.{last}", data, raw_dtype=kind_of_data)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys with the two rows of a rotary pair side by side, as llama.cpp turns them; in
    the folder they lie half a head apart."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Add a byte-level BPE, or bytes, which llama.cpp splits as GPT-2 does."""
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, split = data["model"], data["pre_tokenizer"] or {}
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", ())]
    kinds = {one["type"] for one in (split, data["post_processor"]) if one}
    if model["type"] != "BPE" or kinds != {"ByteLevel"} or (merges and not split.get("use_regex", True)):
        raise ValueError(f"{folder / 'tokenizer.json'}: only a byte-level BPE as Kinformer trains it can be converted.")
    special = {one["id"]: one["content"] for one in data["added_tokens"]}
    texts = {number: text for text, number in model["vocab"].items()} | special
    ids = range(config["vocab_size"])
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(number, f"[unused{number}]") for number in ids])
    writer.add_token_types([control if one in special else normal if one in texts else unused for one in ids])
    writer.add_token_merges(merges or [f"{NUL} {NUL}"])  # llama.cpp needs a merge, and bytes have none
    # Without an end llama.cpp takes token 11, a common sign, for one.
    ends = config["eos_token_id"]
    writer.add_eos_token_id(model["vocab"][NUL] if ends is None else ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    convert(*sys.argv[1:])
