"""Writes docs/models.md: the model families that load, what each needs, and how far it is tested.

    .venv/bin/python scripts/models_page.py

The table is made of `detspec.checkpoint.families`, and of the cases in tests/parity/cases.py.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

from detspec.checkpoint.families import FAMILIES, WRAPPERS
from detspec.checkpoint.families.family import Family
from detspec.checkpoint.families.unsupported import MISSING

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
CASES = ROOT / "tests" / "parity" / "cases.py"
INTRODUCTION = """\
# Models

<!-- Written by scripts/models_page.py; change that, or detspec/checkpoint/families, and run it. -->

A Hugging Face folder loads if its `config.json` is of one of these families. One decoder runs them all. A
[family](../detspec/checkpoint/families/family.py) is a value that says what the keys of its config mean and how its tensors are
called. A key that is not understood is an error. Keys that change nothing are passed over, each with its reason, in
[inert.py](../detspec/checkpoint/families/inert.py) or in the family.

## Families
"""
TESTED = """\
## How they are tested

`make parity` writes small random models of the cases above with Hugging Face transformers, and compares:

* logits in float32, of whole sequences and through the paged cache, within 2e-5 of the largest one;
* 64 greedy tokens;
* the folder that detspec writes, whose tensors have the same bits, in transformers and when it is read again;
* for one case of each kind of layer: bfloat16, which is no further from float32 than 1.5 times what it is in transformers; and
  texts of an engine;
* for experts: the numbers and weights that routers choose, ties, and all rows on one expert.

`tests/parity/fuzz_configs.py` drops, alters and adds keys of each config. A folder must be refused, or have the logits of
transformers. Of 4,577 changes of 37 cases (with transformers 5.24), 3,095 are refused and 1,135 have the same logits; none has
other ones. After 346, transformers itself fails: nearly all are keys that are null, which counts as left out here.

Not tested:

* Weights of published checkpoints: the tests download nothing. Configs and names of tensors are those of transformers.
* Any model with experts on a GPU or TPU: [products with experts](measured_devices.md) ran on an H100 by themselves.

Routers are in the dtype of the model, but for the bias that corrects one, and those of GLM-4.5 and ERNIE: these are float32, as
transformers keeps them. Rounded to bfloat16, ERNIE's chose other experts in 2 of 960 rows of a random model with 64 experts.

Phi-3 with "longrope" has two sets of factors: for texts up to the original length (4,096 tokens in Phi-3.5 and Phi-4 mini), and
for longer ones. In transformers a text changes from one to the other as it grows, and all its keys are worked out anew. Here a
model has one set. `ds.load(folder)` has that of short texts, and a `max_position` of the original length.
`ds.load(folder, long_texts=True)`, or `--long-texts`, has that of long ones, for all its texts. So texts that end within the
original length, and texts that are longer from the start, have the logits of transformers.
"""
INTEGER = """\
## Integer models

[Integer models](integer.md) are made of these families: {taken}.
Where a config asks for what integers do not have, such as a bias of the attention's output, loading says so.

| missing | `model_type` |
|---|---|
{refused}

"""
TAKEN_AS_INTEGERS = (
    "llama mistral qwen2 qwen3 gemma3_text gemma2 gemma smollm3 granite seed_oss ernie4_5 helium ministral phi3 "
    "granitemoehybrid olmo2 olmo3 exaone4 glm4"
)
REFUSED_AS_INTEGERS = {
    "norms of queries and keys after their rotation": "hunyuan_v1_dense",
    "MLPs without a gate": "arcee",
    "LayerNorm": "nemotron starcoder2 gpt2 gpt_neox opt",
    "experts": "qwen3_moe qwen2_moe mixtral olmoe granitemoe glm4_moe minimax_m2 ernie4_5_moe hunyuan_v1_moe gpt_oss",
}
REFUSED = """\
## What is refused by name

Other families are refused; of these, the error says what is missing.

| missing | `model_type` |
|---|---|
"""


def cases_by_class() -> dict[str, list[str]]:
    """The names of the cases by the class of transformers' config, without its last word."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(CASES.read_text(encoding="utf-8"))):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            is_case = isinstance(value, ast.Tuple) and len(value.elts) == 2 and isinstance(value.elts[0], ast.Constant)
            if is_case and isinstance(key, ast.Constant):
                found.setdefault(value.elts[0].value, []).append(key.value)
    return found


def cases_of(family: Family, cases: dict[str, list[str]]) -> list[str]:
    """The names of the cases of a family."""
    for name, found in cases.items():
        if family.architecture in (f"{name.removesuffix('Text')}ForCausalLM", f"{name}LMHeadModel"):
            return found
    return []


def row(family: Family, cases: dict[str, list[str]]) -> str:
    """A line of the table."""
    tested = ", ".join(f"`{name}`" for name in cases_of(family, cases))
    return f"| {family.models} | `{family.model_type}` | {family.needs or '-'} | {tested} |"


def page() -> str:
    """The content of docs/models.md."""
    cases = cases_by_class()
    wrappers = ", ".join(f"`{wrapper.model_type}`" for wrapper in WRAPPERS)
    lines = [
        "| models | `model_type` | what layers have besides Llama's | cases in `make parity` |",
        "|---|---|---|---|",
        *(row(family, cases) for family in FAMILIES),
        "",
        f"Of models with towers for images ({wrappers}) the text part is read, and prompts with images are refused.",
        "",
    ]
    integer = INTEGER.format(taken=named(TAKEN_AS_INTEGERS, ", "), refused="\n".join(rows_of(REFUSED_AS_INTEGERS)))
    return "\n".join([INTRODUCTION, *lines, TESTED, integer + REFUSED + "\n".join(rows_of(MISSING))]) + "\n"


def named(names: str, between: str = " ") -> str:
    """The names in a line of text, as code."""
    return between.join(f"`{name}`" for name in names.split())


def rows_of(missing: Mapping[str, str]) -> list[str]:
    """Lines of a table that says which names lack something."""
    return [f"| {what} | {named(names)} |" for what, names in missing.items()]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(FAMILIES)} families")
