"""Seconds from the command to the first step of ``phylon train`` once the corpus is tokenised.

    python benchmarks/startup/run.py FOLDER [--tries 3]

The first run in FOLDER tokenises the standard library (the recipe ``demo``) and is stopped after a step; then every try
resumes it, and the clock stops when the log has one more step. Prints one line a try.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STEP = b'"kind":"step"'


def first_step(folder: Path, *more: str) -> float:
    """Run the command until its log has a new step; the seconds that took."""
    log = folder / "metrics.jsonl"
    before = log.read_bytes().count(STEP) if log.exists() else 0
    command = [sys.executable, "-m", "phylon", "train", "demo", "--out", str(folder), *more]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"GOMP_SPINCOUNT": "2000"}, text=True)
    while not log.exists() or log.read_bytes().count(STEP) <= before:
        if process.poll() is not None:
            raise SystemExit(process.communicate()[1])
        time.sleep(0.005)
    took = time.perf_counter() - begun
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tries", type=int, default=3)
    asked = parser.parse_args()
    if not (asked.folder / "checkpoints" / "latest").exists():
        print(f"with tokenising: {first_step(asked.folder):.1f} s", flush=True)
    for _ in range(asked.tries):
        print(f"first step after {first_step(asked.folder, '--resume', '--allow-changes'):.2f} s", flush=True)


if __name__ == "__main__":
    main()
