"""Keys of a config.json that do not change what a model computes, and what those that could may hold."""

from collections.abc import Mapping
from typing import Any

NEUTRAL = frozenset(
    [
        "_name_or_path",
        "_attn_implementation_autoset",
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "initializer_range",
        "initializer_factor",
        "gradient_checkpointing",
        "pretraining_tp",
        "task_specific_params",
        "return_dict",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "torchscript",
        "use_bfloat16",
        "problem_type",
        "id2label",
        "label2id",
        "num_labels",
        "prefix",
        "finetuning_task",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "remove_invalid_values",
        "tokenizer_class",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "tf_legacy_loss",
        "predict_special_tokens",
        "output_past",
        "_num_labels",
        "_flash_attn_2_enabled",
        "unsloth_fixed",
        "unsloth_version",
        "transformers.js_config",
        "custom_pipelines",
        "language",
        "name",
        "sentence_transformers",
        "sbert_ce_default_activation_function",
    ]
)
"""Bookkeeping, training-only and task defaults. Special ids are read apart, as generation defaults."""

KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""How the reference can be told to compute attention; ours has its own dispatch. Other names are code to be fetched."""

_KERNEL_KEYS = ("_attn_implementation", "attn_implementation")
_EMPTY = {
    "prune_heads": "heads that were cut off later are not read",
    "pruned_heads": "heads that were cut off later are not read",
    "tie_encoder_decoder": "blocks shared between encoder and decoder are not computed",
    "quantization_config": "its quantised weights are not read",
}
"""Keys that every older file writes and that say nothing only while they are empty, and why."""


CHECKED = frozenset((*_KERNEL_KEYS, *_EMPTY, "auto_map"))
"""Those keys."""


def refusal(data: Mapping[str, Any]) -> str | None:
    """What of the keys that are passed over changes the maths or names foreign code, or ``None``."""
    for key in _KERNEL_KEYS:
        value = data.get(key)
        if value is not None and (not isinstance(value, str) or value.removeprefix("paged|") not in KERNELS):
            return (
                f"'{key}' is {shown(value)}, code of others, which is never run; remove that key "
                f"(known: {', '.join(KERNELS)})"
            )
    for key, why in _EMPTY.items():
        if data.get(key):
            return f"'{key}' is {shown(data[key])}, which is not supported: {why}"
    if data.get("auto_map") and not _of_the_family(data["auto_map"], data.get("model_type")):
        return (
            f"'auto_map' is {shown(data['auto_map'])}, code of its own, which is never run; remove that key to read it "
            f"as the model_type it names"
        )
    return None


def _of_the_family(table: Any, model_type: Any) -> bool:
    """Whether all classes of an ``auto_map`` bear the model_type's name.

    Such is the code that a family had before the reference took it in, and published files of DeepSeek-V3, Falcon and
    MPT still name it. It is not run here; the reference, too, takes its own classes then.
    """

    def plain(name: str) -> str:
        return "".join(filter(str.isalnum, name)).casefold()

    def named(value: Any) -> bool:
        if isinstance(value, list):
            return all(part is None or named(part) for part in value)
        return isinstance(value, str) and plain(value.rpartition(".")[2]).startswith(plain(model_type))

    return (
        isinstance(table, Mapping)
        and isinstance(model_type, str)
        and plain(model_type) != ""
        and all(map(named, table.values()))
    )


def shown(value: Any) -> str:
    """A value out of a file, fit for one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
