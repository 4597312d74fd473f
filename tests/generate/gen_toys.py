"""Tiny models and a tiny tokenizer for the tests of ``phylon.generate``."""

import codecs
from collections.abc import Iterable, Sequence

import torch

from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import FanInInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.absolute import LearnedPositions
from phylon.layers.positions.rotary import Rotary
from phylon.model import Block, Model, ModelSpec, Stack, build, pre_norm
from phylon.patterns import Causal, Pattern, Window

BOS, EOS, END = 256, 257, 258
PIECES = ("Answer", "the ", "司é", "END", "hello wor", " world", "ab", "cd")
VOCAB = 259 + len(PIECES)


class Stream:
    def __init__(self, tokenizer: "Tokens", skip_special: bool) -> None:
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.utf8.decode(self.tokenizer.piece(token, self.skip_special))

    def flush(self) -> str:
        return self.utf8.decode(b"", final=True)


class Tokens:
    """Bytes, a few longer pieces (greedy, longest first), BOS, EOS and END. Speaks the protocol of ``phylon.text``."""

    def __init__(self, *, bos: bool = False) -> None:
        self.bos_id = BOS if bos else None
        self.eos_ids = (EOS, END)

    def piece(self, token: int, skip_special: bool) -> bytes:
        if token < 256:
            return bytes([token])
        if token < 259:
            return b"" if skip_special else (b"<s>", b"</s>", b"<end>")[token - 256]
        return PIECES[token - 259].encode()

    def encode_with_offsets(self, text: str, *, special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans, at = [], [], 0
        if special and self.bos_id is not None:
            ids, spans = [self.bos_id], [(0, 0)]
        while at < len(text):
            piece = max((p for p in PIECES if text.startswith(p, at)), key=len, default=None)
            if piece is not None:
                ids.append(259 + PIECES.index(piece))
                spans.append((at, at + len(piece)))
                at += len(piece)
                continue
            for byte in text[at].encode():
                ids.append(byte)
                spans.append((at, at + 1))
            at += 1
        return ids, spans

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self.encode_with_offsets(text, special=special)[0]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        return b"".join(self.piece(token, skip_special) for token in ids).decode("utf-8", "replace")

    def stream(self, *, skip_special: bool = False) -> Stream:
        return Stream(self, skip_special)

    def chat_ids(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        ids = []
        for message in messages:
            ids += [BOS, *message["role"][0].encode(), *self.encode(message["content"], special=False), END]
        return [*ids, BOS, *b"a"] if add_generation_prompt else ids


def spec(
    *,
    pattern: Pattern | Sequence[Pattern] | None = None,
    max_seq_len: int | None = None,
    learned: bool = False,
    vocab_size: int = VOCAB,
) -> ModelSpec:
    patterns = list(pattern) if isinstance(pattern, Sequence) else [pattern or Causal()] * 2
    rotary = None if learned else Rotary()

    def block(pattern: Pattern) -> Block:
        attn = Attention(n_heads=4, n_kv_heads=2, head_dim=8, rotary=rotary, pattern=pattern)
        return Block(sublayers=(pre_norm(attn, RMSNorm()), pre_norm(GLU(d_ff=48), RMSNorm())))

    positions = LearnedPositions(max_seq_len=max_seq_len or 64) if learned else None
    return ModelSpec(
        decoder=Stack(
            d_model=32,
            embed=TokenEmbed(vocab_size=vocab_size, positions=positions),
            blocks=tuple(block(p) for p in patterns),
            norm_final=RMSNorm(),
        ),
        heads={"lm": LMHead(vocab_size=vocab_size)},
        init=FanInInit(gain=2.0),
        max_seq_len=max_seq_len,
    )


def model(*, tokenizer: bool = True, bos: bool = False, seed: int = 0, dtype: str = "float32", **options) -> Model:
    made = build(spec(**options), seed=seed, dtype=dtype, device="cpu").eval()
    made.tokenizer = Tokens(bos=bos) if tokenizer else None
    return made


def windows() -> tuple[Pattern, ...]:
    return (Window(size=4), Causal())


def whole_logits(made: Model, ids: Sequence[int]) -> torch.Tensor:
    """(T, V): one pass over the whole text, without a state."""
    with torch.no_grad():
        return made(torch.tensor([list(ids)])).logits[0].float()


class Script(torch.nn.Module):
    """Stands in for the head: whatever the text, the tokens of a script win in turn."""

    token_wise = True

    def __init__(self, made: Model, prompt_len: int, script: Sequence[int]) -> None:
        super().__init__()
        self.prompt_len, self.script, self.vocab = prompt_len, list(script), made.spec.heads["lm"].vocab_size

    def forward(self, hidden: torch.Tensor, ctx) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:2], self.vocab)
        last = ctx.records.positions[..., -1].expand(len(hidden))
        for row, position in enumerate(last.tolist()):
            logits[row, -1, self.script[min(position + 1 - self.prompt_len, len(self.script) - 1)]] = 9.0
        return logits


def scripted(prompt: Sequence[int], script: Sequence[int], **options) -> Model:
    """A model that writes exactly ``script`` after a prompt of that length."""
    made = model(**options)
    made.heads["lm"] = Script(made, len(prompt), script)
    return made
