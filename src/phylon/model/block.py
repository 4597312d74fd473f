"""Blocks and stacks: the residual algebra as modules with canonical names."""

from typing import NamedTuple

from torch import Tensor, nn

from phylon.layers.context import Context
from phylon.layers.ffn.mlp import dropped
from phylon.layers.norms import ResidualNorm
from phylon.layers.part import Part, child
from phylon.model.spec import Block, Stack, Sublayer
from phylon.spec.base import Norm
from phylon.spec.registry import build


class _Branch(NamedTuple):
    op: str
    norm_in: str | None
    norm_branch: str | None
    gain: float | None
    drop: float


class _Sublayer(NamedTuple):
    branches: tuple[_Branch, ...]
    norm_shared: str | None
    norm_out: str | None


class BlockModule(Part):
    """The sublayers of a block: children ``<op>``, ``<op>_norm``, ``<op>_norm_branch``, ``<op>_norm_out``.

    The norms of a sublayer with several branches are named after its first op; ``<op>_norm_shared`` is the shared one.
    """

    def __init__(self, spec: Block, d_model: int) -> None:
        super().__init__()
        names = {place: name for name, place in spec.ops().items()}
        plan = []
        for s, sublayer in enumerate(spec.sublayers):
            plan.append(self._add_sublayer(sublayer, [names[s, b] for b in range(len(sublayer.branches))], d_model))
        self.plan = tuple(plan)

    def _add_sublayer(self, spec: Sublayer, names: list[str], width: int) -> _Sublayer:
        def add(norm: Norm | None, name: str) -> str | None:
            if norm is None:
                return None
            self.add_module(name, build(norm, width))
            return name

        shared = add(spec.norm_shared, f"{names[0]}_norm_shared")
        branches = []
        for name, branch in zip(names, spec.branches, strict=True):
            norm_in = add(branch.norm_in, f"{name}_norm")
            self.add_module(name, build(branch.op, width))
            norm_branch = add(branch.norm_branch, f"{name}_norm_branch")
            branches.append(_Branch(name, norm_in, norm_branch, branch.gain, branch.drop))
        return _Sublayer(tuple(branches), shared, add(spec.norm_out, f"{names[0]}_norm_out"))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = self.tap(ctx, "resid_pre", x)
        last = len(self.plan) - 1
        added: Tensor | None = None
        for i, sublayer in enumerate(self.plan):
            x, added = self._sublayer(x, added, sublayer, ctx)
            if ctx.taps is not None:
                x, added = _sum(x, added), None
                x = self.tap(ctx, "resid_post" if i == last else "resid_mid" if i == 0 else f"resid_mid{i + 1}", x)
        return _sum(x, added)

    def _sublayer(self, x: Tensor, added: Tensor | None, plan: _Sublayer, ctx: Context) -> tuple[Tensor, Tensor | None]:
        """The stream and what is still to be added to it: the next norm takes the sum along."""
        alone = plan.branches[0].norm_in if len(plan.branches) == 1 else None
        first = plan.norm_shared or alone
        x, source = (_sum(x, added),) * 2 if first is None else self._after(first, x, added)
        added = None
        for branch in plan.branches:
            x = _sum(x, added)
            normed = branch.norm_in is None or branch.norm_in == first
            h = source if normed else child(self, branch.norm_in or "")(source)
            h = child(self, branch.op)(h, ctx)
            h = self.tap(ctx, f"{branch.op}.out", h)
            h = h if branch.norm_branch is None else child(self, branch.norm_branch)(h)
            h = h if branch.gain is None else h * branch.gain
            added = dropped(h, branch.drop, self.training)
        return (x, added) if plan.norm_out is None else (self._after(plan.norm_out, x, added)[1], None)

    def _after(self, name: str, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x + added`` and its norm."""
        norm = child(self, name)
        if isinstance(norm, ResidualNorm):
            return norm(x, added)
        x = _sum(x, added)
        return x, norm(x)


def _sum(x: Tensor, added: Tensor | None) -> Tensor:
    return x if added is None else x + added


class StackModule(Part):
    """``embed``, ``blocks``, ``shared``, ``norm_final``."""

    def __init__(self, spec: Stack) -> None:
        super().__init__()
        self.spec = spec
        self.embed = build(spec.embed, spec.d_model)
        self.blocks = nn.ModuleList(BlockModule(block, spec.d_model) for block in spec.blocks)
        if spec.shared:
            self.shared = nn.ModuleDict({name: build(m, spec.d_model) for name, m in spec.shared.items()})
        self.norm_final = None if spec.norm_final is None else build(spec.norm_final, spec.d_model)

    def forward(self, inputs: Tensor | None, embeds: Tensor | None, ctx: Context) -> Tensor:
        """Hidden states (B, T, D) from the stack's input."""
        if self.spec.shared:
            ctx.shared = dict(self.shared.items())
        x = ctx.embedded = self.tap(ctx, "embed.out", self.embed(inputs, embeds, ctx))
        for block in self.blocks:
            x = block(x, ctx)
        x = x if self.norm_final is None else self.norm_final(x)
        return self.tap(ctx, "out", dropped(x, self.spec.dropout, self.training))
