"""What sorting by length saves ``phylon.generate.encode``: texts of 8 to 128 tokens, against padding in given order.

    python benchmarks/encode/run.py [--model minilm] [--texts 512] [--pairs 5]

Both ways run the same model on the same texts, tokenizing included, in batches of at most 4,096 tokens with padding.
Pairs are interleaved (A B A B); medians, and the median of the pairs' ratios, are printed as JSON.
"""

import argparse
import json
import statistics
import time

import torch

import phylon
from phylon.generate import encode
from phylon.generate.encode import _pooled, padded
from phylon.model import Model

BATCH_TOKENS, SHORTEST, LONGEST = 4096, 8, 128


@torch.inference_mode()
def in_given_order(model: Model, texts: list[str]) -> torch.Tensor:
    """The usual way: as many texts as fit if each were the longest, in the order given, padded to their longest."""
    assert model.tokenizer is not None
    rows = model.tokenizer.encode_batch(texts)
    step = BATCH_TOKENS // LONGEST
    found = []
    for start in range(0, len(rows), step):
        tokens, segments = padded(rows[start : start + step], model.device)
        hidden = model(tokens, segments=segments, logits="none").hidden
        found.append(_pooled(hidden, segments, "mean"))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def texts_of(model: Model, n: int) -> list[str]:
    """Texts whose lengths in tokens, [CLS] and [SEP] included, are drawn from 8 to 128."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [" ".join(["river"] * (length - 2)) for length in lengths]
    assert model.tokenizer is not None
    assert [len(ids) for ids in model.tokenizer.encode_batch(texts)] == lengths
    return texts


def timed(run) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    vectors = run()
    return time.perf_counter() - start, vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    model = phylon.load(args.model, device="cpu", dtype="float32")
    texts = texts_of(model, args.texts)
    ways = {
        "sorted": lambda: encode(model, texts, batch_tokens=BATCH_TOKENS),
        "padded": lambda: in_given_order(model, texts),
    }
    for run in ways.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.pairs):
        given = {}
        for name, run in ways.items():
            spent, given[name] = timed(run)
            seconds[name].append(spent)
        assert float((given["sorted"] - given["padded"]).abs().max()) < 1e-5, "the two ways differ"
    ratios = [p / s for s, p in zip(seconds["sorted"], seconds["padded"], strict=True)]
    print(
        json.dumps(
            {
                "model": args.model,
                "texts": len(texts),
                "threads": torch.get_num_threads(),
                "texts_per_second": {name: round(len(texts) / statistics.median(s), 1) for name, s in seconds.items()},
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(r, 3) for r in ratios],
            }
        )
    )


if __name__ == "__main__":
    main()
