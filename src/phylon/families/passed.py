"""What each key that is passed over must hold, as the pinned reference has it: a value of another kind was never meant.

Keys that the reference does not declare may hold anything, and so may null.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Kind(NamedTuple):
    """What a value must be, in words and as a check."""

    words: str
    holds: Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


def _is_label_table(value: Any) -> bool:
    return isinstance(value, dict) and all(str(key).strip().removeprefix("-").isdecimal() for key in value)


def _are_ids(value: Any) -> bool:
    return _whole(value) or (isinstance(value, list) and all(map(_whole, value)))


_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

TEXT = Kind("a text", lambda value: isinstance(value, str))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number of at least 0", lambda value: _whole(value) and value >= 0)
SIZE = Kind("a whole number of at least 1", lambda value: _whole(value) and value >= 1)
NUMBER = Kind("a number", _real)
SPREAD = Kind("a number of at least 0", lambda value: _real(value) and value >= 0)
SHARE = Kind("a number from 0 to 1", lambda value: _real(value) and 0 <= value <= 1)
TABLE = Kind("a table", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
IDS = Kind("a token id or a list of them", _are_ids)

_KEYS: dict[Kind, str] = {
    Kind("a list of names", _texts): "architectures",
    Kind("the name of a dtype", _is_dtype): "dtype torch_dtype",
    Kind("a table of names by number", _is_label_table): "id2label",
    Kind(f"one of {', '.join(_PROBLEMS)}", lambda value: value in _PROBLEMS): "problem_type",
    Kind("a whole number of at least 1, or auto", lambda value: value == "auto" or SIZE.holds(value)): "time_step_rank",
    Kind("true, false or never", lambda value: value == "never" or SWITCH.holds(value)): "early_stopping",
    TEXT: """
        _name_or_path transformers_version tokenizer_class prefix cache_implementation init_device pooler_act
        summary_activation summary_type time_step_init_scheme
    """,
    SWITCH: """
        add_router_probs attention_softmax_in_fp32 do_sample is_decoder is_encoder_decoder learned_pos_emb
        output_attentions output_hidden_states output_router_logits output_scores remove_invalid_values
        reorder_and_upcast_attn rescale_prenorm_residual residual_in_fp32 return_dict return_dict_in_generate
        router_ignore_padding_tokens scale_attention_softmax_in_fp32 sinusoidal_pos_embds slow_but_exact
        summary_proj_to_labels summary_use_proj use_associative_scan use_cache use_mamba_kernels use_mambapy
    """,
    COUNT: """
        chunk_size_feed_forward encoder_no_repeat_ngram_size max_length min_length min_new_tokens no_repeat_ngram_size
        num_labels pretraining_tp top_k
    """,
    SIZE: "chunk_size encoder_stride n_positions num_beam_groups num_beams num_return_sequences pooler_output_size",
    NUMBER: """
        diversity_penalty encoder_repetition_penalty epsilon_cutoff eta_cutoff guidance_scale length_penalty
        penalty_alpha repetition_penalty temperature top_p typical_p
    """,
    SPREAD: "init_std initializer_factor router_aux_loss_coef router_z_loss_coef time_step_floor time_step_scale",
    SHARE: """
        attention_probs_dropout_prob classifier_dropout decoder_layerdrop embedding_fraction encoder_layerdrop
        hidden_dropout_prob initializer_range summary_first_dropout
    """,
    TABLE: "label2id task_specific_params",
    LIST: "bad_words_ids exponential_decay_length_penalty force_words_ids",
    IDS: """
        begin_suppress_tokens bos_token_id cls_token_id decoder_start_token_id eos_token_id forced_bos_token_id
        forced_eos_token_id pad_token_id sep_token_id suppress_tokens unk_token_id
    """,
}
_KIND_OF = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}


def wrong(key: str, value: Any) -> str | None:
    """What ``key`` must hold where ``value`` is no such thing, or ``None``."""
    kind = _KIND_OF.get(key)
    return None if value is None or kind is None or kind.holds(value) else kind.words
