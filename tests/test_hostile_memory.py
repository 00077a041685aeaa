"""The worst inputs in a process that gets one more GiB of memory: one `InputError` each, and none for want of memory."""

import json
import subprocess
import sys
from pathlib import Path

from tests.checkpoint.test_hostile_templates import TOO_LARGE, TOO_LONG

ALLOWED_BYTES = 1 << 30
MOST_SECONDS = 600  # for all of them, the import of jax included, on a machine that does much else
TEMPLATES = {
    **{name: TOO_LARGE[name] for name in ("times", "center", "percent", "texts", "lists", "views", "replace", "join_filter")},
    **{name: TOO_LONG[name] for name in ("loops", "output", "output_data")},
}
PROGRAM = f"""
import json, resource, sys
from pathlib import Path
from detspec.checkpoint.chat import ChatTemplate
from detspec.checkpoint.load import load_config
from detspec.errors import InputError
from detspec.jobs.lines import parse_line

folder = Path(sys.argv[1])
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {ALLOWED_BYTES},) * 2)

def refuse(name, read):
    try:
        read()
    except InputError as error:
        assert not isinstance(error.__cause__, MemoryError), name
        return
    raise AssertionError(f"{{name}} was read")

for config in sorted(folder.glob("*/config.json")):
    refuse(config, lambda: load_config(config.parent))
for name, source in json.loads((folder / "templates.json").read_text()).items():
    refuse(name, lambda: ChatTemplate(source, {{}}).render([{{"role": "user", "content": "x"}}]))
for line in (folder / "lines").read_bytes().splitlines():
    refuse(line[:80], lambda: parse_line(0, line))
try:
    bytearray(2 * {ALLOWED_BYTES})
except MemoryError:
    print("done")
"""
CONFIG = {
    "model_type": "mistral",
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def test_worst_inputs_take_no_memory_to_speak_of(tmp_path: Path):
    """The program ends with the control: two GiB more are not to be had."""
    configs = {
        "layers": json.dumps({**CONFIG, "num_hidden_layers": 10**9}),
        "deep": '{"a":' * 200_000 + "1" + "}" * 200_000,
        "digits": json.dumps(CONFIG)[:-1] + ', "rope_theta": ' + "9" * 10**6 + "}",
        "long": json.dumps({**CONFIG, "x": "y" * 5_000_000}),
        "empty_lists": json.dumps(CONFIG)[:-1] + ', "x": [' + "[]," * 300_000 + "0]}",
    }
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "templates.json").write_text(json.dumps(TEMPLATES))
    lines = [b"[" * 200_000, b'{"id": "a", "x": [' + b"[]," * 1_000_000 + b"[]]}}", b'"' + b"x" * 17_000_000]
    (tmp_path / "lines").write_bytes(b"\n".join(lines))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    assert found.stdout.split() == ["done"], found.stderr[-2000:]
