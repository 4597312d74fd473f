"""What families with experts share: their tensors in foreign layouts, and what their formats can say of a mixture."""

from phylon.checkpoint import Rename, Rule, Stack
from phylon.layers.ffn.dispatchers import Dropless
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import Router
from phylon.model.spec import ModelSpec
from phylon.spec.base import FeedForward
from phylon.spec.errors import UserError
from phylon.spec.override import override


def with_ffn(spec: ModelSpec, blocks: list[int], ffn: FeedForward) -> ModelSpec:
    """``spec`` with the feed-forward networks of the given decoder blocks replaced."""
    return override(spec, {f"decoder.blocks.{i}.ffn": ffn for i in blocks})


def expert_rules(theirs: str, ours: str, router: str, names: tuple[str, str, str]) -> list[Rule]:
    """Experts stored one by one as ``theirs`` + ``experts.{e}.<name>.weight``, and the router's map.

    ``names`` are theirs of gate, up and down. The pinned ``transformers`` keeps gate and up of all experts in one
    tensor while it runs, and writes and reads this layout, which is also that of the released checkpoints.
    """
    maps = zip(names, ("gate_proj", "up_proj", "down_proj"), strict=True)
    return [
        Rename(theirs + router + ".weight", ours + "router.proj.weight"),
        *(Stack(f"{theirs}experts.{{e}}.{name}.weight", f"{ours}experts.{m}.weight") for name, m in maps),
    ]


def gated_experts(moe: MoE, router: type[Router]) -> GLU:
    """The expert of a mixture that a Hugging Face configuration can say, or a one-line refusal."""
    if not isinstance(moe.router, router):
        raise UserError(f"this format needs a {router.__name__}, the model has {type(moe.router).__name__}")
    if not isinstance(moe.expert, GLU) or moe.expert.bias or moe.expert.dropout:
        raise UserError("the experts must be gated ones without biases and dropout")
    if not isinstance(moe.dispatch, Dropless) or not isinstance(moe.eval_dispatch, Dropless):
        raise UserError("an expert capacity cannot be said; set dispatch and eval_dispatch to 'dropless'")
    return moe.expert
