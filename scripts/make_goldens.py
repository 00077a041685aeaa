#!/usr/bin/env python
"""Writes small models of every family and the results of Hugging Face transformers, for tests that run without torch.

Needs `pip install ".[parity]"`. Each folder of tests/checkpoint/goldens is a model saved by transformers, with a file
golden.npz: token ids, logits at some positions, and a greedy continuation.

    python scripts/make_goldens.py
"""

import shutil
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "parity"))

from cases import CASES, LENGTH, greedy, logits, token_rows, write  # noqa: E402

GOLDENS = ROOT / "tests" / "checkpoint" / "goldens"
NAMES = ("llama_llama3", "mistral", "qwen2_yarn", "qwen3", "gemma2", "gemma3_linear")
SIZES = {"hidden_size": 24, "intermediate_size": 32}
POSITIONS = np.asarray([0, 1, 15, 16, 17, 31, 32, 33, 64, 90, 118, 119])
NUM_PROMPT = 40
NUM_NEW = 64


def main() -> int:
    """Replaces all goldens."""
    shutil.rmtree(GOLDENS, ignore_errors=True)
    for name in NAMES:
        assert name in CASES
        folder = GOLDENS / name
        model = write(name, folder, **SIZES)
        tokens = next(token_rows(1, LENGTH))
        np.savez_compressed(
            folder / "golden.npz",
            tokens=np.asarray(tokens, np.int32),
            positions=POSITIONS,
            logits=logits(model, [tokens])[0][POSITIONS],
            continuation=np.asarray(greedy(model, tokens[:NUM_PROMPT], NUM_NEW), np.int32),
            num_prompt=NUM_PROMPT,
        )
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name:16} {size / 1e3:7.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
