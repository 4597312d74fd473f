"""The recurrent baseline of translation: Bahdanau et al. (arXiv:1409.0473), sections 3.1, 3.2 and appendix A.

A bidirectional GRU reads the source; a GRU writes the target and attends to the source additively before every token.
Trained on the very batches of a Transformer's run (its tokenizer, pairs, split, order) for the same CPU time:

    python benchmarks/tasks/recurrent.py runs/en-de --seconds 600
"""

import argparse
import json
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from phylon.ops.loss import IGNORE, cross_entropy
from phylon.spec.registry import build
from phylon.text import Tokenizer
from phylon.train import InverseSqrt, load_recipe
from phylon.train.measures import bleu
from phylon.train.objectives.translation import Translation
from phylon.train.prepare import check, prepare
from phylon.train.rng import seed_all


class Bahdanau(nn.Module):
    """``d`` is the width of embeddings and of each direction; the decoder's state is 2 d wide."""

    def __init__(self, vocab_size: int, d: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d)
        self.encoder = nn.GRU(d, d, bidirectional=True, batch_first=True)
        self.start = nn.Linear(d, 2 * d)
        self.query, self.key = nn.Linear(2 * d, d, bias=False), nn.Linear(2 * d, d)
        self.score = nn.Linear(d, 1, bias=False)
        self.cell = nn.GRUCell(3 * d, 2 * d)
        self.out = nn.Linear(5 * d, d)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.drop = nn.Dropout(dropout)
        nn.init.normal_(self.embed.weight, std=d**-0.5)

    def read(self, source: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The source (B, S) as annotations (B, S, 2 D), their keys, what is padding, and the first state."""
        lengths = segments.sum(1)
        x = nn.utils.rnn.pack_padded_sequence(
            self.drop(self.embed(source)), lengths, batch_first=True, enforce_sorted=False
        )
        found, last = self.encoder(x)
        memory, _ = nn.utils.rnn.pad_packed_sequence(found, batch_first=True, total_length=source.shape[1])
        return memory, self.key(memory), segments == 0, torch.tanh(self.start(last[1]))

    def step(self, y: Tensor, state: Tensor, memory: Tensor, keys: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """The next state, and what the output map reads, from the embedded token before (B, D)."""
        scores = self.score(torch.tanh(self.query(state)[:, None] + keys))[..., 0].masked_fill(padding, -torch.inf)
        context = (scores.softmax(1)[:, None] @ memory)[:, 0]
        state = self.cell(torch.cat([y, context], 1), state)
        return state, torch.cat([state, y, context], 1)

    def logits(self, read: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.out(read))) @ self.embed.weight.T + self.bias

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        memory, keys, padding, state = self.read(batch["source"], batch["source_segments"])
        embedded, reads = self.drop(self.embed(batch["tokens"])), []
        for t in range(embedded.shape[1]):
            state, read = self.step(embedded[:, t], state, memory, keys, padding)
            reads.append(read)
        return self.logits(torch.stack(reads, 1))

    @torch.inference_mode()
    def beam(self, source: list[int], start: int, eos: int, n_beams: int, most: int, penalty: float) -> list[int]:
        """The best finished hypothesis, scored as ``phylon.generate.beam_search`` scores it."""
        ids = torch.tensor([source])
        memory, keys, padding, state = self.read(ids, torch.ones_like(ids))
        beams, done = [([], 0.0)], []
        for _ in range(most):
            n = len(beams)
            last = torch.tensor([tokens[-1] if tokens else start for tokens, _ in beams])
            wide = (x.expand(n, *x.shape[1:]) for x in (memory, keys, padding))
            state, read = self.step(self.embed(last), state.expand(n, -1), *wide)
            totals = self.logits(read).log_softmax(-1) + torch.tensor([total for _, total in beams])[:, None]
            best = totals.flatten().topk(2 * n_beams)
            grown, rows = [], []
            for total, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                row, token = divmod(index, totals.shape[1])
                if token == eos:
                    done.append((total / (len(beams[row][0]) + 1) ** penalty, beams[row][0]))
                elif len(grown) < n_beams:
                    grown.append(([*beams[row][0], token], total))
                    rows.append(row)
            beams, state = grown, state[rows]
            done = sorted(done, key=lambda item: -item[0])[:n_beams]
            if len(done) == n_beams and beams[0][1] / most**penalty <= done[-1][0]:
                break
        return max(done, key=lambda item: item[0])[1] if done else beams[0][0]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run", type=Path)
    options.add_argument("--seconds", type=float, nargs="+", required=True, help="CPU time of training at each BLEU")
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--lr", type=float, default=2e-3)
    options.add_argument("--rows", type=int, default=None, help="held-out pairs of the BLEU")
    given = options.parse_args()
    recipe = load_recipe(given.run / "recipe.toml", {"run.eval_rows": given.rows})
    torch.set_num_threads(1)
    prepared = prepare(
        recipe, given.run, check(recipe, None, "cpu"), "cpu", print, lambda _: None, resume=True, kept=True
    )
    tokenizer, feed, objective = prepared.tokenizer, prepared.feed, recipe.objective
    seed_all(recipe.run.seed)
    model = Bahdanau(tokenizer.vocab_size, given.width, dropout=0.1)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = build(recipe.optim.replace(lr=given.lr), model.named_parameters())
    schedule, clock, step, shown = InverseSqrt(warmup=300), Clock(), 0, []
    for until in sorted(given.seconds):
        model.train()
        while (spent := clock.spent()) < until:
            batch = feed.loader.batch(step)
            loss = cross_entropy(model(batch), batch["targets"], label_smoothing=objective.label_smoothing)
            loss.sum.backward()
            count = int(loss.count)
            norm = optimizer.norm(count).value
            optimizer.step(given.lr * schedule.ratio(step, 1), min(1.0, 1.0 / norm) / count)
            shown.append(float(loss.mean.detach()))
            step += 1
            if step % 100 == 0:
                print(f"step {step}, {spent:.0f} s: loss {sum(shown) / len(shown):.3f}", flush=True)
                shown = []
        with clock.stopped():
            result = measure(model, feed.held_out(), tokenizer, objective)
        print(json.dumps({"steps": step, "cpu_seconds": spent} | result), flush=True)


def measure(
    model: Bahdanau, batches: Iterable[dict[str, Tensor]], tokenizer: Tokenizer, objective: Translation
) -> dict:
    """BLEU of the beam search, and the loss without smoothing."""
    model.eval()
    said, right, nll, n = [], [], 0.0, 0
    start, eos = objective.generation(tokenizer).decoder_start_id, tokenizer.eos_ids[0]
    for batch in batches:
        with torch.inference_mode():
            loss = cross_entropy(model(batch), batch["targets"])
        nll, n = nll + float(loss.sum), n + int(loss.count)
        for row in range(len(batch["source"])):
            source = batch["source"][row][batch["source_segments"][row] != 0].tolist()
            target = batch["targets"][row][batch["targets"][row] != IGNORE].tolist()
            found = model.beam(source, start, eos, objective.n_beams or 1, len(source) + 50, objective.length_penalty)
            said.append(tokenizer.decode(found, skip_special=True).strip())
            right.append(tokenizer.decode(target, skip_special=True).strip())
    score, signature = bleu(said, right)
    shown = [" | ".join(pair) for pair in zip(said, right, strict=True)][:: max(1, len(said) // 4)]
    return {"bleu": score, "nll": nll / n, "pairs": len(said), "signature": signature, "said": shown}


class Clock:
    """CPU time, less what is spent on evaluation."""

    def __init__(self) -> None:
        self.start = time.process_time()

    def spent(self) -> float:
        return time.process_time() - self.start

    @contextmanager
    def stopped(self) -> Generator[None]:
        before = time.process_time()
        yield
        self.start += time.process_time() - before


if __name__ == "__main__":
    main()
