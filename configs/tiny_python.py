"""A small Llama trained on the Python standard library: the model that is shipped with the package.

    detspec train --config configs/tiny_python.py

Corpus     .py files of the standard library of CPython 3.11.7, without tests and tables. Training: 577 files, 9.6 MB, 3.0 M
           tokens. Held out by a hash of names: 24 files, 336 kB, 102 k tokens. Another Python has another corpus.
Model      3.43 M parameters, float32; exported in bfloat16 (6.9 MB).
Training   7.68 M tokens (2.6 epochs): 3300 steps of 8 rows of 256, then 450 of 2 rows of 1024.
Hardware   2 shared cores of an AMD EPYC (AVX-512), jax 0.10.2, at low priority next to other work: 70 min, median 2400 tok/s
           in rows of 256 and 1230 in rows of 1024; up to 5000 on an idle machine.
Held out   2.599 nats per token over 101,376 tokens in rows of 1024 (3.29 bytes per token, so 1.139 bits per byte), equal in
           float32 and bfloat16; first 16 k tokens: 4.35 at step 250, 3.39 at 1000, 2.92 at 2000, 2.59 at 3000, 2.49 at 3750.
These numbers are from before batches were cut into slices: the same training now ends with other bits.
Chips      The first 200 steps on 1, 2 and 4 CPU devices of one process, by turns on 2 shared cores with other work, took 232,
           186 and 173 s. All three gave one SHA-256 of the weights, leaf by leaf in the order of `jax.tree.leaves`:
           d48bc46f21fb09fa7f953c1d4816c1f630b33375f0e0b7ade7471023a9ff82df.
"""

from detspec.model.dense import dense_config
from detspec.train.batches import Phase
from detspec.train.language import LanguageConfig
from detspec.train.optimizer import OptimizerConfig


def get_config() -> LanguageConfig:
    """The run that made `detspec/assets/tiny_python`."""
    return LanguageConfig(
        model=dense_config(
            vocab_size=2048,
            d_model=256,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            d_ff=688,
            tie_embeddings=True,
            max_position=1024,
            dtype="float32",
        ),
        corpus="python_stdlib",
        phases=(Phase(num_steps=3300, batch_size=8, seq_len=256), Phase(num_steps=450, batch_size=2, seq_len=1024)),
        optimizer=OptimizerConfig(peak_lr=2e-3, final_lr=1e-4, warmup_steps=100),
    )
