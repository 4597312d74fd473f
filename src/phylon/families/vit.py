"""ViT: a pre-norm encoder over patches of an image, a class token in front. Dosovitskiy et al. (arXiv:2010.11929), §3.

DeiT (Touvron et al., arXiv:2012.12877) is the same encoder with a second learned token, taught by another model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from phylon.checkpoint import Drop, Layout, Rename, Reshaped, Rule, TensorSource
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import activation_name, head_width, hf_activation, op_of, part
from phylon.families.encoder import TASKS, bare_layout, encoder_of, labels, n_classes_of, read_task, task_of
from phylon.families.sizes import sized
from phylon.layers.embeddings.patches import PatchEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.heads.classify import Classify, Pooled
from phylon.layers.heads.distilled import Distilled
from phylon.layers.heads.pools import First, Mean
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.model.spec import Block, ModelSpec, Stack, pre_norm
from phylon.patterns import Full
from phylon.spec.base import Head, Init, Pool
from phylon.spec.errors import UserError, check_size, did_you_mean

_VIT = {"Model": TASKS["Model"], "ForImageClassification": ("class",)}
_DEIT = {**_VIT, "ForImageClassificationWithTeacher": ("distilled",)}


@sized
def vit_spec(
    *,
    d_model: int = 192,
    n_layers: int = 4,
    n_heads: int = 3,
    d_ff: int | None = None,
    image_size: tuple[int, int] = (32, 32),
    patch_size: int = 4,
    n_channels: int = 3,
    n_extra: int = 1,
    eps: float = 1e-12,
    activation: str = "gelu",
    qkv_bias: bool = True,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    heads: tuple[str, ...] = ("class",),
    pool: str = "first",
    n_classes: int = 10,
    init: Init | None = None,
) -> ModelSpec:
    """A vision transformer; ``d_ff`` is 4 D. ``heads``: class, pooled, distilled, or none; ``pool``: first or mean."""
    height, width = image_size
    for side in image_size:
        check_size("a side of image_size", side)
    if height % patch_size or width % patch_size:
        raise UserError(f"images of {height} x {width} do not cut into patches of {patch_size} x {patch_size}")
    pools: dict[str, Pool] = {"first": First(), "mean": Mean()}
    if pool not in pools:
        raise UserError(f"unknown pool '{pool}'{did_you_mean(pool, pools)}")
    known: dict[str, Head] = {
        "class": Classify(n_classes=n_classes, pool=pools[pool]),
        "pooled": Pooled(pool=First(), activation="tanh"),
        "distilled": Distilled(n_classes=n_classes),
    }
    for name in heads:
        if name not in known:
            raise UserError(f"unknown head '{name}'{did_you_mean(name, known)}")
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_width(d_model, n_heads),
        qkv_bias=qkv_bias,
        out_bias=True,
        pattern=Full(),
        dropout=attention_dropout,
    )
    norm, ffn = LayerNorm(eps=eps), MLP(d_ff=d_ff or 4 * d_model, activation=activation)
    block = Block(sublayers=(pre_norm(attention, norm, drop=dropout), pre_norm(ffn, norm, drop=dropout)))
    grid = (height // patch_size, width // patch_size)
    return ModelSpec(
        encoder=Stack(
            d_model=d_model,
            embed=PatchEmbed(patch_size=patch_size, grid=grid, n_channels=n_channels, n_extra=n_extra, dropout=dropout),
            blocks=(block,) * n_layers,
            norm_final=norm,
        ),
        heads={name: known[name] for name in heads},
        init=init or NormalInit(std=0.02),
        max_seq_len=n_extra + grid[0] * grid[1],
    )


deit_spec = partial(vit_spec, n_extra=2, heads=("distilled",))
"""The builder of ViT with DeiT's second learned token and its head."""


def _read(config: Config, prefix: str, tasks: dict[str, tuple[str, ...]], n_extra: int) -> ModelSpec:
    # Used by the decoder of masked-image modelling alone.
    config.ignore("encoder_stride")
    heads = read_task(config, prefix, tasks)
    with_pooler = config.take("add_pooling_layer", None, bool)
    if heads == ("pooled",) and not (config.stores("pooler.", True) if with_pooler is None else with_pooler):
        heads = ()
    d_model, patch_size = config.size("hidden_size"), config.take("patch_size", 16, (int, list))
    if isinstance(patch_size, list) and patch_size:
        config.expect("patch_size", [patch_size[0]] * 2, why="patches are square")
        patch_size = patch_size[0]
    if heads == ("pooled",):
        config.expect("pooler_output_size", None, d_model, why="the pooler keeps the width")
        config.expect("pooler_act", "tanh", why="the pooler ends in tanh")
    config.ignore("pooler_output_size", "pooler_act")
    spec = vit_spec(
        d_model=d_model,
        n_layers=config.depth("num_hidden_layers"),
        n_heads=config.size("num_attention_heads"),
        d_ff=config.size("intermediate_size"),
        image_size=_image_size(config),
        patch_size=_checked(config, "patch_size", patch_size),
        n_channels=config.size("num_channels", 3),
        n_extra=n_extra,
        eps=config.number("layer_norm_eps", 1e-12),
        activation=activation_name(config, "hidden_act", "gelu"),
        qkv_bias=config.take("qkv_bias", True, bool),
        attention_dropout=config.number("attention_probs_dropout_prob", 0.0),
        dropout=config.number("hidden_dropout_prob", 0.0),
        heads=heads,
        n_classes=n_classes_of(config, heads),
    )
    config.finish()
    return spec


def _image_size(config: Config) -> tuple[int, int]:
    size = config.take("image_size", 224, (int, list))
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    return _checked(config, "image_size", height), _checked(config, "image_size", width)


def _checked(config: Config, key: str, pixels: Any) -> int:
    if not isinstance(pixels, int) or isinstance(pixels, bool) or not 1 <= pixels <= 2**16:
        raise UserError(f"{config.where}: '{key}' in pixels must be from 1 to {2**16}, got {pixels!r}")
    return pixels


def _write(spec: ModelSpec, model_type: str, prefix: str, tasks: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    stack = encoder_of(spec)
    attention, ffn = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP)
    embed = part(stack.embed, PatchEmbed, "the embedding")
    height, width = (n * embed.patch_size for n in embed.grid)
    distilled = spec.heads.get("distilled")
    n_classes = {} if not isinstance(distilled, Distilled) else _labels(distilled.n_classes)
    return {
        "architectures": [task_of(spec, prefix, tasks)],
        "model_type": model_type,
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "num_attention_heads": attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "image_size": height if height == width else [height, width],
        "patch_size": embed.patch_size,
        "num_channels": embed.n_channels,
        "layer_norm_eps": part(stack.norm_final, LayerNorm, "the final norm").eps,
        "hidden_act": hf_activation(ffn.activation),
        "qkv_bias": attention.qkv_bias,
        "attention_probs_dropout_prob": attention.dropout,
        "hidden_dropout_prob": embed.dropout,
        **labels(spec),
        **n_classes,
    }


def _labels(n: int) -> dict[str, Any]:
    names = [f"LABEL_{i}" for i in range(n)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def _layout(spec: ModelSpec, family: str) -> Layout:
    embed = part(encoder_of(spec).embed, PatchEmbed, "the embedding")
    prefix = "" if set(spec.heads) <= {"pooled"} else f"{family}."
    theirs, ours = prefix + "encoder.layer.{i}.", "encoder.blocks.{i}."
    pixels = (embed.n_channels, embed.patch_size, embed.patch_size)
    at, tokens = prefix + "embeddings.", ("cls_token", "distillation_token")
    rules: list[Rule | Drop] = [
        Reshaped(
            at + "patch_embeddings.projection.weight",
            ("encoder.embed.proj.weight",),
            to=_flat,
            back=partial(_as_kernel, pixels=pixels),
        ),
        Rename(at + "patch_embeddings.projection.bias", "encoder.embed.proj.bias"),
        _Tokens(at + "cls_token", "encoder.embed.extra", tuple(at + name for name in tokens[: embed.n_extra])),
        Reshaped(at + "position_embeddings", ("encoder.embed.positions",), to=_without_row, back=_as_row),
        Rename(theirs + "attention.attention.query.{p}", ours + "attn.q_proj.{p}"),
        Rename(theirs + "attention.attention.key.{p}", ours + "attn.k_proj.{p}"),
        Rename(theirs + "attention.attention.value.{p}", ours + "attn.v_proj.{p}"),
        Rename(theirs + "attention.output.dense.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "layernorm_before.{p}", ours + "attn_norm.{p}"),
        Rename(theirs + "layernorm_after.{p}", ours + "ffn_norm.{p}"),
        Rename(theirs + "intermediate.dense.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "output.dense.{p}", ours + "ffn.down_proj.{p}"),
        Rename(prefix + "layernorm.{p}", "encoder.norm_final.{p}"),
        Rename("pooler.dense.{p}", "heads.pooled.dense.{p}"),
        Rename("classifier.{p}", "heads.class.proj.{p}"),
        Rename("cls_classifier.{p}", "heads.distilled.proj.{p}"),
        Rename("distillation_classifier.{p}", "heads.distilled.teacher_proj.{p}"),
        Drop(at + "mask_token", "the token of masked-image modelling"),
    ]
    return bare_layout(spec, rules, prefix)


@dataclass(frozen=True)
class _Tokens(Rule):
    """The learned tokens in front: ours is (n, D), each of theirs (1, 1, D)."""

    ours: str
    names: tuple[str, ...]

    @property
    def their_names(self) -> tuple[str, ...]:
        return self.names

    def foreign(self, theirs: str, shapes: Sequence[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
        assert shapes[0][0] == len(self.names), f"{self.ours} has {shapes[0][0]} tokens"
        return [(name, (1, 1, shapes[0][1])) for name in self.names]

    def take(self, source: TensorSource, names: Sequence[str], outs: Sequence[torch.Tensor]) -> None:
        for which, name in enumerate(names):
            source.read_into(name, self.give(outs, which))

    def give(self, tensors: Sequence[torch.Tensor], which: int) -> torch.Tensor:
        return tensors[0][which][None, None]


def _flat(kernel: torch.Tensor) -> torch.Tensor:
    return kernel.flatten(1)


def _as_kernel(weight: torch.Tensor, *, pixels: tuple[int, int, int]) -> torch.Tensor:
    return weight.unflatten(1, pixels)


def _without_row(table: torch.Tensor) -> torch.Tensor:
    return table.squeeze(0)


def _as_row(table: torch.Tensor) -> torch.Tensor:
    return table[None]


def _write_vit(spec: ModelSpec) -> dict[str, Any]:
    if part(encoder_of(spec).embed, PatchEmbed, "the embedding").n_extra != 1:
        raise UserError("ViT has one learned token in front; two are DeiT's")
    return _write(spec, "vit", "ViT", _VIT)


def _write_deit(spec: ModelSpec) -> dict[str, Any]:
    if part(encoder_of(spec).embed, PatchEmbed, "the embedding").n_extra != 2:
        raise UserError("DeiT has two learned tokens in front; one is ViT's")
    return _write(spec, "deit", "DeiT", _DEIT)


def _cases() -> list[ModelSpec]:
    tiny = partial(vit_spec, d_model=24, n_layers=2, n_heads=3, image_size=(12, 12), n_classes=5)
    return [
        tiny(),
        tiny(image_size=(12, 20), d_ff=35, activation="gelu_tanh", qkv_bias=False, n_channels=1),
        tiny(n_extra=0, pool="mean"),
    ]


def _deit_cases() -> list[ModelSpec]:
    tiny = partial(vit_spec, d_model=24, n_layers=2, n_heads=3, image_size=(12, 12), n_classes=5, n_extra=2)
    return [tiny(heads=("distilled",)), tiny()]


_vit = partial(vit_spec, image_size=(224, 224), patch_size=16, n_classes=1000)
_deit = partial(_vit, n_layers=12, n_extra=2, heads=("distilled",))

register_family(
    Family(
        name="vit",
        title="ViT",
        paper="arXiv:2010.11929",
        builder=vit_spec,
        presets={
            "vit-b16": partial(_vit, d_model=768, n_layers=12, n_heads=12),
            "vit-l16": partial(_vit, d_model=1024, n_layers=24, n_heads=16),
            "vit-h14": partial(_vit, d_model=1280, n_layers=32, n_heads=16, patch_size=14),
        },
        cases=_cases,
        hf=HFFormat(
            model_types=("vit",),
            read=partial(_read, prefix="ViT", tasks=_VIT, n_extra=1),
            write=_write_vit,
            layout=partial(_layout, family="vit"),
        ),
        golden={"vit-b16": 86_567_656, "vit-l16": 304_326_632, "vit-h14": 632_045_800},
    )
)
register_family(
    Family(
        name="deit",
        title="DeiT",
        paper="arXiv:2012.12877",
        builder=deit_spec,
        presets={
            "deit-ti16": partial(_deit, d_model=192, n_heads=3),
            "deit-s16": partial(_deit, d_model=384, n_heads=6),
            "deit-b16": partial(_deit, d_model=768, n_heads=12),
        },
        cases=_deit_cases,
        hf=HFFormat(
            model_types=("deit",),
            read=partial(_read, prefix="DeiT", tasks=_DEIT, n_extra=2),
            write=_write_deit,
            layout=partial(_layout, family="deit"),
        ),
        golden={"deit-ti16": 5_910_800, "deit-s16": 22_436_432, "deit-b16": 87_338_192},
    )
)
