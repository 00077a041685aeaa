"""Each way in which one tensor holds several weights, or a weight another way round: read, cut into blocks, written again."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detspec.checkpoint import shards
from detspec.checkpoint.arena import Arena
from detspec.checkpoint.families.family import TensorNames, respelled
from detspec.checkpoint.files import Problems, read_headers, write_tensors
from detspec.checkpoint.hf import check_tensors, read_params
from detspec.checkpoint.layout import Layout, in_layer
from detspec.checkpoint.shards import Source, Tensor, read_block
from detspec.checkpoint.tensors import named_tensors, stored_tensors
from detspec.errors import InputError

Tensors = dict[str, np.ndarray]
RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(12, 8)), RNG.normal(size=(4, 8)), RNG.normal(size=(4, 8))
E_GATE, E_UP = RNG.normal(size=(3, 6, 8)), RNG.normal(size=(3, 6, 8))

# Name of the form -> weights of a layer, the layout of the tensor, and the tensor, put together by hand.
FORMS: dict[str, tuple[Tensors, Layout, np.ndarray]] = {
    "rows": ({"q": Q, "k": K, "v": V}, in_layer("q", "k", "v"), np.concatenate([Q, K, V])),
    "biases": ({"q": Q[:, 0], "k": K[:, 0]}, in_layer("q", "k"), np.concatenate([Q[:, 0], K[:, 0]])),
    "rows of experts": (
        {"gate": E_GATE, "up": E_UP},
        in_layer("gate", "up", axis=1),
        np.stack([np.concatenate([gate, up]) for gate, up in zip(E_GATE, E_UP, strict=True)]),
    ),
    "heads in turns": (
        {"q": Q, "k": Q + 1, "v": Q + 2},
        in_layer("q", "k", "v", turn=4),
        np.concatenate([matrix[head : head + 4] for head in (0, 4, 8) for matrix in (Q, Q + 1, Q + 2)]),
    ),
    "biases in turns": (
        {"q": Q[:, 0], "k": Q[:, 1]},
        in_layer("q", "k", turn=4),
        np.concatenate([Q[head : head + 4, column] for head in (0, 4, 8) for column in (0, 1)]),
    ),
    "turned": ({"q": Q}, in_layer("q", turned=True), Q.T),
    "turned rows": ({"q": Q, "k": K, "v": V}, in_layer("q", "k", "v", turned=True), np.concatenate([Q.T, K.T, V.T], 1)),
    "turned experts in turns": (
        {"gate": E_GATE, "up": E_UP},
        in_layer("gate", "up", axis=1, turn=1, turned=True),
        np.stack([E_GATE, E_UP], 2).reshape(3, 12, 8).transpose(0, 2, 1),
    ),
    "turned experts": ({"down": E_GATE}, in_layer("down", axis=1, turned=True), E_GATE.transpose(0, 2, 1)),
    "biases of experts in turns": (
        {"gate": E_GATE[..., 0], "up": E_UP[..., 0]},
        in_layer("gate", "up", axis=1, turn=1),
        np.stack([E_GATE[..., 0], E_UP[..., 0]], 2).reshape(3, 12),
    ),
    "skipped rows": ({"q": Q}, Layout((("layers", "{}", "q"),), skipped=2), np.concatenate([np.zeros((2, 8)), Q])),
    "axis of length 1": ({"q": Q[:, 0]}, in_layer("q", ones=1), Q[None, :, 0]),
}
NAME = "h.{}.fused"


def params_of(form: str) -> Any:
    """Two layers; the second one has the weights less 100."""
    weights = {name: array.astype(np.float32) for name, array in FORMS[form][0].items()}
    return {"layers": ({**weights}, {name: array - 100 for name, array in weights.items()})}


def names_of(form: str) -> TensorNames:
    return {NAME: FORMS[form][1]}


def write(folder: Path, form: str) -> Path:
    folder.mkdir(exist_ok=True)
    write_tensors(folder, named_tensors(names_of(form), params_of(form)), None)
    return folder


def read(folder: Path, form: str, dtype: Any = np.float32) -> tuple[Any, list[str]]:
    """The weights, and what is wrong with them."""
    problems = Problems(folder)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params_of(form))
    wanted = stored_tensors(names_of(form), shapes)
    headers = read_headers(folder, problems)
    check_tensors(wanted, headers, problems)
    return ({} if problems else read_params(folder, wanted, shapes, headers, problems)), list(problems)


def flat_bytes(params: Any) -> dict[str, bytes]:
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in jax.tree.leaves_with_path(params)}


@contextlib.contextmanager
def counting_reads() -> Iterator[list[int]]:
    """The sizes of all that is read from files meanwhile."""
    sizes: list[int] = []

    def counting(file: Any, begin: int, target: memoryview) -> None:
        sizes.append(len(target))
        read(file, begin, target)

    read = shards.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "read_bytes", counting)
        yield sizes


@pytest.mark.parametrize("form", FORMS)
def test_tensor_is_what_is_put_together_by_hand_and_comes_back_bit_for_bit(tmp_path: Path, form: str):
    folder = write(tmp_path / "model", form)
    stored = load_file(folder / "model.safetensors")
    assert stored[NAME.format(0)].tobytes() == FORMS[form][2].astype(np.float32).tobytes()
    assert stored[NAME.format(0)].shape == FORMS[form][2].shape
    with counting_reads() as sizes:
        loaded, problems = read(folder, form)
    assert problems == []
    assert flat_bytes(loaded) == flat_bytes(params_of(form))
    assert sum(sizes) == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
    half, _ = read(folder, form, jax.numpy.bfloat16)
    assert flat_bytes(half) == flat_bytes(jax.tree.map(lambda leaf: leaf.astype(jax.numpy.bfloat16), params_of(form)))


@pytest.mark.parametrize("form", FORMS)
def test_every_block_has_the_numbers_of_the_whole(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch):
    folder = write(tmp_path / "model", form)
    (header, _) = read_headers(folder, Problems(folder)).values()
    weights, layout, _ = FORMS[form]
    shapes = [array.shape for array in weights.values()]
    for piece_bytes in (8, 200, 1 << 20):  # the smallest tiles, several, and one
        monkeypatch.setattr(shards, "PIECE_BYTES", piece_bytes)
        for cut, array in zip(layout.cuts(shapes), weights.values(), strict=True):
            source = Source([Tensor("", header, None, layout, (cut,))], (jax.ShapeDtypeStruct(array.shape, np.float32),))
            for axis, size in enumerate(array.shape):
                for part in ((0, size // 2), (size // 3, size), (size - 1, size)):  # the second one cuts a head
                    block = tuple(part if i == axis else (0, whole) for i, whole in enumerate(array.shape))
                    (found,), infinite = read_block(folder, source, block, Arena())
                    expected = array.astype(np.float32)[tuple(slice(*bounds) for bounds in block)]
                    assert (found.tobytes(), infinite) == (expected.tobytes(), []), (piece_bytes, block)


@pytest.mark.parametrize("form", ["heads in turns", "turned experts in turns"])
def test_weights_in_turns_are_read_in_one_go(tmp_path: Path, form: str):
    """The control reads each of them alone, and so the tensor as often as it holds weights."""
    folder = write(tmp_path / "model", form)
    header = read_headers(folder, Problems(folder))[NAME.format(0)]
    weights, layout, _ = FORMS[form]
    shapes = [array.shape for array in weights.values()]
    cuts = layout.cuts(shapes)
    likes = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    block = tuple((0, size) for size in shapes[0])
    with counting_reads() as together:
        read_block(folder, Source([Tensor("", header, None, layout, cuts)], likes), block, Arena())
    with counting_reads() as alone:
        for cut in cuts:
            read_block(folder, Source([Tensor("", header, None, layout, (cut,))], likes[:1]), block, Arena())
    assert sum(together) == header.size
    assert sum(alone) == len(cuts) * header.size


def transposed(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.swapaxes(0, -1))


CHANGES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "shorter": (lambda array: array[..., :-1].copy(), "tensor h.1.fused has shape"),
    "transposed": (transposed, "tensor h.1.fused has shape"),
    "infinite": (lambda array: array + np.float32(np.inf), "tensor h.1.fused holds NaN or infinite weights"),
    "whole numbers": (lambda array: array.astype(np.int32), "h.1.fused has the unsupported dtype I32"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["rows", "turned rows", "turned experts in turns", "biases of experts in turns"])
def test_tensor_that_is_wrong_is_named(tmp_path: Path, form: str, change: str):
    folder = write(tmp_path / "model", form)
    tensors = load_file(folder / "model.safetensors")
    alter, message = CHANGES[change]
    tensors[NAME.format(1)] = alter(tensors[NAME.format(1)])
    save_file(tensors, folder / "model.safetensors")
    problems = read(folder, form)[1]
    assert problems
    assert all(message in problem for problem in problems)


def test_shape_of_a_fused_tensor_is_said_with_what_the_config_asks_for(tmp_path: Path):
    folder = write(tmp_path / "model", "rows")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, NAME.format(0): tensors[NAME.format(0)][:19].copy()}, folder / "model.safetensors")
    assert read(folder, "rows")[1] == ["tensor h.0.fused has shape [19, 8], the config asks for [20, 8]"]


def test_fused_tensor_without_one_of_its_weights_is_no_tensor_of_the_model():
    """As in families whose models have biases or not: the table has both names, and the weights say which tensors there are."""
    params: Any = {"layers": ({"q": Q, "k": K},)}
    names: TensorNames = {"qkv": in_layer("q", "k", "v"), "h.{}.qk": in_layer("q", "k")}
    assert list(stored_tensors({"h.{}.qkv": names["qkv"], "h.{}.qk": names["h.{}.qk"]}, params)) == ["h.0.qk"]
    with pytest.raises(InputError, match=r"no tensor name for the weight layers\.0\.k"):
        stored_tensors({"h.{}.qkv": names["qkv"]}, params)


def test_weights_of_other_sizes_do_not_lie_in_turns():
    with pytest.raises(InputError, match="cannot lie in one tensor"):
        in_layer("q", "k", turn=4).shape([(8, 4), (12, 4)])


def test_experts_in_tensors_of_their_own_may_be_fused(tmp_path: Path):
    """A name with one more place than its paths: the parts of several stacked weights."""
    params: Any = {"layers": ({"gate": E_GATE, "up": E_UP},)}
    tensors = named_tensors({"h.{}.experts.{}.w13": in_layer("gate", "up")}, params)
    assert list(tensors) == [f"h.0.experts.{expert}.w13" for expert in range(3)]
    for expert, tensor in enumerate(tensors.values()):
        assert (np.asarray(tensor) == np.concatenate([E_GATE[expert], E_UP[expert]])).all()


def test_names_of_a_folder_may_begin_otherwise():
    names = {"transformer.wte.weight": ("embed",), "lm_head.weight": ("head",)}
    assert respelled({"transformer.": ""})(names) == {"wte.weight": ("embed",), "lm_head.weight": ("head",)}
