"""Writes a Hugging Face folder as a stateful OpenVINO model, weights unchanged; runs in an environment with `optimum-intel`."""

import os
import shutil
import sys
from pathlib import Path

from optimum.exporters.openvino import main_export


def main() -> None:
    """Reads `hf` below the folder of the first argument, writes `openvino` next to it: whole or not at all."""
    folder = Path(sys.argv[1])
    part = folder / "openvino.part"
    shutil.rmtree(part, ignore_errors=True)
    # Without a dtype optimum keeps the model's own, and it compresses none but large models.
    main_export(str(folder / "hf"), part, task="text-generation-with-past", stateful=True, library_name="transformers")
    os.replace(part, folder / "openvino")


if __name__ == "__main__":
    main()
