"""PyTorch's work as calls that `timing` takes: captured once in a CUDA graph, then replayed. A CPU runs it as it is."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from prove_stages.timing import Call
from prove_stages.torch_llama import LayerCache, TorchLlama, step

WARM_UPS = 3  # before a capture: libraries allocate and choose kernels, which a graph cannot hold


class Queued:
    """Work that a GPU has yet to do. `jax.block_until_ready` waits for it as for an array."""

    def block_until_ready(self) -> "Queued":
        """Waits for everything that PyTorch has queued."""
        torch.cuda.synchronize()
        return self


class DecodeLoop:
    """Greedy steps of one batch at one position; each step is fed with the tokens that the last one chose.

    Attributes:
        tokens: `[B]` int64, fed to the next step.
        logits: `[B, V]` of the last step.
        call: runs a step.
    """

    def __init__(self, model: TorchLlama, cache: Sequence[LayerCache], first: Tensor, position: int) -> None:
        """Takes the cache's first sequences, as many as there are tokens in `first [B]`, at most all."""
        self._first = first
        self.tokens = first.clone()
        self._own = [(keys[: len(first)], values[: len(first)]) for keys, values in cache]
        self._model = model
        self._position = position
        self.call = captured(self._step, first.device)

    def first_row(self) -> Tensor:
        """Logits `[V]` of the first sequence after the first tokens."""
        self.tokens.copy_(self._first)
        self.call()
        return self.logits[0].clone()

    def _step(self) -> None:
        self.logits = step(self._model, self._own, self.tokens, self._position)  # of a graph: the same memory at each replay
        self.tokens.copy_(self.logits.argmax(-1))


def products(weights: Sequence[Tensor], rows: int, rounds: int) -> Call:
    """Products of random `[rows, in]` with each of `weights [out, in]` in turn, as often as `rounds` says, in one call."""
    x = torch.randn(rows, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)

    def multiply() -> None:
        for weight in [*weights] * rounds:
            F.linear(x, weight)

    return captured(multiply, x.device)


def captured(work: Callable[[], None], device: torch.device) -> Call:
    """A call that does `work`, from a graph where the device has graphs."""
    if device.type == "cpu":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # jax's threads share the device: what they ask of it must not end a capture that is none of theirs.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()

    def replay() -> Queued:
        graph.replay()
        return Queued()

    return replay


def device_of(platform: str) -> torch.device:
    """PyTorch's device for jax's `platform`, "cpu" or "gpu"; `RuntimeError` if it sees no GPU."""
    if platform == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU, jax does: install a torch for this GPU's driver")
    return torch.device("cuda")


def num_different(one: Tensor, other: Tensor) -> int:
    """Counts how many numbers of two arrays have different bits; dtypes are equal and floating-point."""
    integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return int((one.contiguous().view(integers) != other.contiguous().view(integers)).sum())
