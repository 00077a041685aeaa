"""Renders a table of conversations with every chat template of a folder, here and with transformers, and compares all bytes.

    python scripts/compare_templates.py FOLDER

Prompts may have lists of texts, too. Where a content is a list of one text, the prompt must be the one of the text itself, both
rendered here, unless the template prints the list's text in another way: that has a name.

A template is a folder with a `tokenizer_config.json` or a `chat_template.jinja`, with what lies next to it, or else a file
`*.jinja`, `*.jinja2` or `chat_template.json`. Equal ones are compared once. It needs the extra `parity`.

A row is printed for each template with a difference, and with `--all` for the others, too: how many conversations gave equal
texts, how many were refused by both, and how many differ for a reason in `KNOWN`. The exit code is 1 if one differs otherwise,
or if there is no template.
"""

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers.utils import chat_template_utils

from detspec.checkpoint.chat import ChatTemplate, read_chat_template
from detspec.checkpoint.folder import TEMPLATE_FOLDER
from detspec.errors import InputError

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "think_token": "<t>"}
NOON = datetime.datetime(2024, 7, 26, 12)
SHOWN = 60  # characters of a text around a difference

# Differences that are meant: words of one side's error, and the reason.
KNOWN = {
    "continue_final_message goes on with": "here an answer goes on from an assistant's message alone",
    "it takes more than": "here the work of a template is bounded",
    "accepted are up to": "here texts and lists that a template makes are bounded",
    "underscore-prefixed": "transformers refuses names in a namespace that begin with an underscore",
    "type generator is not JSON": "here lazy filters give lists; transformers writes no generator as JSON",
}

LOOPS = "the template prints texts of parts in another way than texts"

Asked = tuple[list[dict[str, Any]], dict[str, Any]]  # messages, options

USER = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}
SYSTEM = {"role": "system", "content": "You are brief."}
AGAIN = {"role": "user", "content": "And 3 + 3?"}
FIELDS: dict[str, Any] = {"word": {"type": "string", "description": "which"}}
FIELDS["limit"] = {"type": ["integer", "null"], "default": None}
FIELDS["kinds"] = {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}
LOOK_UP = {
    "name": "look_up",
    "description": "Looks a word up: <b>, 'é', \"quoted\".",
    "parameters": {"type": "object", "properties": FIELDS, "required": ["word"]},
}
TOOL = {"type": "function", "function": LOOK_UP}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"word": "π", "limit": 3}}}
TEXT_CALL = {**CALL, "function": {"name": "look_up", "arguments": '{"word": "π", "limit": 3}'}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "3.14"}
NULLS = {"content": None, "tool_calls": None, "refusal": None, "name": None, "reasoning_content": None, "audio": None}
ODD_TEXTS = ("", " ", "  \n two lines \n\n", "漢字 👩‍👩‍👧 \u200b é", "<b>&amp;\"'</b> {{ x }} {% y %}")
ODD_TEXTS += ("</think>", "<think>\na\n</think>\n\nb")


def text_parts(*texts: str) -> list[dict[str, str]]:
    """A content that is a list of parts."""
    return [{"type": "text", "text": text} for text in texts]


# Lists of one text. The prompt holds it elsewhere, too, so that it may get lost unseen.
IN_PARTS = {
    "part in another message": [{**USER, "content": "is it so?"}, ANSWER, {**USER, "content": text_parts("so")}],
    "parts like roles": [{**USER, "content": text_parts("assistant")}, {**ANSWER, "content": text_parts("user")}],
    "part of a system": [{**SYSTEM, "content": text_parts("user")}, {**USER, "content": text_parts("system")}],
}


def conversations() -> dict[str, Asked]:
    """Messages and options by what they show."""
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    table: dict[str, Asked] = {
        "one message": ([USER], {}),
        "no opening of an answer": ([USER, ANSWER], {"add_generation_prompt": False}),
        "system": ([SYSTEM, USER], {}),
        "system alone": ([SYSTEM], {}),
        "developer": ([{**SYSTEM, "role": "developer"}, USER], {}),
        "turns": ([SYSTEM, USER, ANSWER, AGAIN, ANSWER, USER], {}),
        "turns without system": ([USER, ANSWER, AGAIN], {}),
        "two of the user": ([USER, AGAIN], {}),
        "two of the assistant": ([USER, ANSWER, ANSWER, AGAIN], {}),
        "assistant first": ([ANSWER, AGAIN], {}),
        "late system": ([USER, ANSWER, SYSTEM, AGAIN], {}),
        "unknown role": ([USER, {"role": "critic", "content": "no"}, AGAIN], {}),
        "no role": ([{"content": "a"}], {}),
        "no content": ([USER, {"role": "assistant"}, AGAIN], {}),
        "nulls": ([{**NULLS, **USER}, {"role": "assistant", **NULLS}, {**NULLS, **AGAIN}], {}),
        "nulls and an answer": ([USER, {**NULLS, **ANSWER}, AGAIN], {}),
        "null content of a call": ([USER, {**NULLS, "role": "assistant", "tool_calls": [CALL]}, RESULT], {"tools": [TOOL]}),
        "nulls inside": ([USER, {**calling, "tool_calls": [{**CALL, "index": None}]}, RESULT], {"tools": [TOOL]}),
        "tools": ([USER], {"tools": [TOOL, TOOL]}),
        "tools and system": ([SYSTEM, USER, ANSWER, AGAIN], {"tools": [TOOL]}),
        "no tools": ([USER], {"tools": []}),
        "bare tool": ([USER], {"tools": [LOOK_UP]}),
        "call and result": ([SYSTEM, USER, calling, RESULT], {"tools": [TOOL]}),
        "call without tools": ([USER, calling, RESULT, ANSWER, AGAIN], {}),
        "call as text": ([USER, {**calling, "tool_calls": [TEXT_CALL]}, RESULT, ANSWER, AGAIN], {"tools": [TOOL]}),
        "two calls": ([USER, {**calling, "tool_calls": [CALL, CALL]}, RESULT, RESULT], {"tools": [TOOL]}),
        "result that is an object": ([USER, calling, {**RESULT, "content": {"pi": 3.14, "ok": True}}], {"tools": [TOOL]}),
        "parts": ([{**SYSTEM, "content": text_parts("a")}, {**USER, "content": text_parts("b", "c")}], {}),
        "parts of an answer": ([USER, {**ANSWER, "content": text_parts("b", "c")}, AGAIN], {}),
        "parts of a result": ([USER, calling, {**RESULT, "content": text_parts("3", "14")}], {"tools": [TOOL]}),
        "no parts": ([{**USER, "content": []}], {}),
        "enable_thinking": ([USER], {"enable_thinking": True}),
        "no thinking": ([USER, ANSWER, AGAIN], {"enable_thinking": False, "thinking": False}),
        "documents": ([USER], {"documents": [{"title": "t", "text": "d"}]}),
        "a token of the caller's": ([USER], {"bos_token": "<begin>"}),
    }
    option: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    table["message of the user goes on"] = ([USER], option)
    for name in ("reasoning_content", "reasoning", "thinking"):
        thought = {**ANSWER, name: "I add."}
        table[name] = ([USER, thought, AGAIN], {})
        table[f"{name} before a call"] = ([USER, {**calling, name: "I look."}, RESULT], {"tools": [TOOL]})
        table[f"{name} goes on"] = ([USER, thought], {**option, "continue_final_message": name})
        table[f"{name} and a prefill"] = ([USER, thought], option)
    for number, text in enumerate(ODD_TEXTS):
        table[f"odd text {number}"] = ([{**SYSTEM, "content": text}, {**USER, "content": text}], {})
        table[f"odd answer {number}"] = ([USER, {**ANSWER, "content": text}, {**USER, "content": text}], {})
        table[f"odd prefill {number}"] = ([USER, {**ANSWER, "content": text}], option)
    for name, text in {"prefill": "The answer is", "prefill with a blank": " The answer is "}.items():
        table[name] = ([SYSTEM, USER, {**ANSWER, "content": text}], option)
        table[f"{name}, parts"] = ([USER, {**ANSWER, "content": text_parts("First.", text)}], option)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if a difference has no name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="print a row for each template without differences, too")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take each N-th template only")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    table = conversations()
    print(f"{'equal':>6} {'refused':>8} {'named':>6} {'differ':>7}  template")
    totals: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    num_templates = 0
    for path in itertools.islice(templates(args.folder), 0, None, args.every):
        found = compare(path, table)
        num_templates += bool(found)
        counts = Counter(kind for kind, _ in found.values())
        totals += counts
        reasons.update(said for kind, said in found.values() if kind == "named")
        if found and (args.all or counts["differ"]):
            print_row(counts, str(path.relative_to(args.folder)))
        for case, (kind, said) in found.items():
            if kind == "differ":
                print(f"        {case}: {said}", flush=True)
    print_row(totals, f"{num_templates} templates, {len(table) + len(IN_PARTS)} conversations each")
    for reason, count in reasons.items():
        print(f"{count} named: {reason}")
    return int(totals["differ"] > 0 or not num_templates)


def print_row(counts: Counter[str], name: str) -> None:
    """Prints a line of the table."""
    print(f"{counts['equal']:6} {counts['refused']:8} {counts['named']:6} {counts['differ']:7}  {name}", flush=True)


def templates(folder: Path) -> Iterator[Path]:
    """Folders and files that hold templates, each content once."""
    seen = set()
    for path in sorted(folder.rglob("*")):
        if path.name in ("tokenizer_config.json", "chat_template.jinja"):
            path = path.parent
        elif path.parent.name == TEMPLATE_FOLDER or not is_template(path):
            continue
        files = [path]
        if path.is_dir():
            files = [*(path / name for name in SIDE_FILES), *sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))]
        digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files if file.is_file())).digest()
        if digest not in seen:
            seen.add(digest)
            yield path


def is_template(path: Path) -> bool:
    """Whether the file `path` is one template."""
    return path.is_file() and (path.suffix in (".jinja", ".jinja2") or path.name == "chat_template.json")


def compare(path: Path, table: dict[str, Asked]) -> dict[str, tuple[str, str]]:
    """For each conversation "equal", "refused", "named" or "differ", and what there is to say; {} if there is no template."""
    with tempfile.TemporaryDirectory() as name:
        lay_out(path, Path(name))
        ours = attempt(lambda: read_chat_template(Path(name)))
        theirs = attempt(lambda: transformers.PreTrainedTokenizerFast.from_pretrained(name))
    if ours is None and getattr(theirs, "chat_template", None) is None:
        return {}
    found = {case: judge(text_of(ours, *asked), text_of(theirs, *asked)) for case, asked in table.items()}
    return found | {case: judge_parts(ours, messages) for case, messages in IN_PARTS.items() if isinstance(ours, ChatTemplate)}


def lay_out(path: Path, folder: Path) -> None:
    """Copies the template at `path` into a folder that both can read, with a tokenizer of no words."""
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, "<unk>")).save(str(folder / "tokenizer.json"))
    if path.is_dir():
        for name in (*SIDE_FILES, TEMPLATE_FOLDER):
            if (path / name).is_dir():
                shutil.copytree(path / name, folder / name)
            elif (path / name).is_file():
                shutil.copyfile(path / name, folder / name)
        return
    config = dict(TOKENS)
    if path.suffix == ".json":
        config["chat_template"] = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    else:
        shutil.copyfile(path, folder / "chat_template.jinja")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def text_of(renderer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """The rendered conversation, or the error."""
    options = {"add_generation_prompt": True, **options}
    if isinstance(renderer, ChatTemplate):
        return attempt(lambda: renderer.render(messages, now=NOON, **options))
    if isinstance(renderer, Exception | None):
        return renderer or InputError("there is no template")
    with at_noon():
        return attempt(lambda: renderer.apply_chat_template(messages, tokenize=False, **options))


@contextlib.contextmanager
def at_noon() -> Iterator[None]:
    """Stops the clock of templates that transformers renders."""
    clock = chat_template_utils.datetime
    chat_template_utils.datetime = type("Noon", (datetime.datetime,), {"now": staticmethod(lambda: NOON)})
    try:
        yield
    finally:
        chat_template_utils.datetime = clock


def attempt(action: Callable[[], Any]) -> Any:
    """The result of `action`, or the error that it raises: templates raise anything."""
    try:
        return action()
    except Exception as error:
        return error


def judge(ours: Any, theirs: Any) -> tuple[str, str]:
    """Compares two results: a kind as in `compare`, and what there is to say."""
    if isinstance(ours, Exception) and isinstance(theirs, Exception):
        return "refused", ""
    if ours == theirs:
        return "equal", ""
    errors = {"here": ours, "there": theirs}
    for side, error in errors.items():
        if isinstance(error, Exception):
            reason = next((why for words, why in KNOWN.items() if words in str(error)), None)
            return ("named", reason) if reason else ("differ", f"refused {side}: {error}"[:300])
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    place = sum(1 for _ in same)
    start = max(0, place - SHOWN // 2)
    return "differ", f"at {place}: {ours[start : place + SHOWN]!r} here, not {theirs[start : place + SHOWN]!r}"


def judge_parts(template: ChatTemplate, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """Compares a prompt with lists of one text with the prompt of the texts, as `judge`."""
    texts = ["".join(part if isinstance(part, str) else part["text"] for part in message["content"]) for message in messages]
    alone = [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
    prompt, expected = (attempt(lambda talk=talk: template.render_parts(talk, now=NOON)) for talk in (messages, alone))
    if isinstance(prompt, str) and prompt != expected:
        least = expected if isinstance(expected, str) else "".join(texts)  # some templates take lists alone
        is_printed = all(prompt.count(text) >= least.count(text) for text in texts)
        if is_printed and all(prompt.count(name) <= least.count(name) for name in ("'type'", '"type"')):
            return "named", LOOPS
    return judge(prompt, expected)


if __name__ == "__main__":
    sys.exit(main())
