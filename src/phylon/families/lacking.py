"""What a model_type that no family file says would need: by its name where it is common, else by the keys beside it."""

from collections.abc import Mapping
from typing import Any

_IMAGES = "its text is read beside images, which no family computes"
_AUDIO = "its encoder embeds audio frames, which is no mechanism here"
_NO_FILE = "no family file says it yet"
_PARTS = "its parts exist ({}), but no family file arranges them"
_ALL_HEADS = "its queries and keys are normalised over all heads at once, which is no mechanism here"
_WIDTH = "an embedding of another width than its blocks is no mechanism here"
_ROUTER = "its router exists (norm_topk_prob says which of two), but no family file says it with the names of this one"

_BY_NAME = {
    "albert": _WIDTH,
    "bart": _PARTS.format("a post-norm encoder-decoder, learned positions, a norm on the embedding"),
    "big_bird": _PARTS.format("BigBird's pattern in a post-norm encoder"),
    "clip": "its two towers are compared with each other, which is no head here",
    "deberta": "its scores of content and position apart (disentangled attention) are no mechanism here",
    "deberta-v2": "its scores of content and position apart (disentangled attention) are no mechanism here",
    "deepseek_v2": "its router (the best groups of softmax scores) is no mechanism here",
    "electra": "its discriminator is no head here",
    "gemma": _PARTS.format("Gemma's norm, scaled embeddings, a gated feed-forward"),
    "gemma2": "soft-capped scores between norms on both sides of a branch exist, but no family file arranges them",
    "gemma3": _IMAGES,
    "gpt_oss": "its scores have a learned sink and its experts clamped gates, which are no mechanisms here",
    "longformer": "its global tokens have projections of their own, which is no mechanism here",
    "mt5": "its blocks are those of T5 v1.1, but no family file says it under this name",
    "olmo2": _ALL_HEADS,
    "olmoe": _ALL_HEADS,
    "opt": _PARTS.format("a pre-norm decoder with learned positions and ReLU"),
    "phi": _PARTS.format("parallel branches behind one norm, partial rotary"),
    "phi3": _PARTS.format("LLaMA's blocks in fused tensors") + "; its 'longrope' scaling is no mechanism here",
    "qwen2": _PARTS.format("LLaMA's blocks with biases on q, k and v"),
    "qwen2_moe": "its shared expert has a gate of its own, which is no mechanism here",
    "qwen3_moe": _ROUTER,
    "recurrent_gemma": "its gated linear recurrence is no mechanism here",
    "reformer": "its hashed attention and reversible stream are no mechanisms here",
    "rwkv": "its recurrence (time mixing) is no mechanism here",
    "starcoder2": _PARTS.format("a pre-norm decoder with rotary positions, grouped keys and biases"),
    "swin": "its attention in shifted windows of an image is no mechanism here",
    "transfo-xl": "its memory of earlier segments with relative positions is no mechanism here",
    "umt5": "a relative bias of its own in every block is not what T5's file says, and no family file says it",
    "wav2vec2": _AUDIO,
    "whisper": _AUDIO,
    "xlm-roberta": "its keys and tensors are those of RoBERTa: with model_type 'roberta' and a Roberta architecture it "
    "is read",
    "xlnet": "its two streams of attention with relative positions are no mechanism here",
} | dict.fromkeys(("llava", "mllama", "qwen2_vl", "qwen2_5_vl", "llama4", "paligemma", "idefics"), _IMAGES)

_BY_KEY = {
    "vision_config": "text beside images",
    "audio_config": "audio frames",
    "num_mel_bins": "audio frames",
    "feat_extract_norm": "audio frames",
    "pos_att_type": "disentangled attention",
    "attention_chunk_size": "attention in chunks",
    "swiglu_limit": "clamped gates",
    "rescale_every": "time mixing",
    "num_hashes": "hashed attention",
    "altup_num_inputs": "alternating updates of several residual streams",
    "lru_width": "a gated linear recurrence",
}
"""Keys that only models with a mechanism have that is not here, and the mechanism."""


def lacking(model_type: str, config: Mapping[str, Any]) -> str:
    """Why a configuration of this ``model_type`` is not read: what is missing, as far as its name or its keys say."""
    if model_type in _BY_NAME:
        return _BY_NAME[model_type]
    found = [f"'{key}' means {what}, which is no mechanism here" for key, what in _BY_KEY.items() if config.get(key)]
    if config.get("embedding_size") not in (None, config.get("hidden_size")):
        found.append(_WIDTH)
    return "; ".join([_NO_FILE, *found[:2]])
