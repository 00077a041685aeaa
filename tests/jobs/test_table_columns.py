"""Columns of many types as lines: what a cell holds is what the line holds, and what a line cannot hold is refused by name."""

import datetime
import decimal
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import compute, parquet

from detspec.checkpoint.chat import ChatTemplate
from detspec.errors import InputError
from detspec.jobs.lines import parse_line, parse_request
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import read_lines
from detspec.jobs.tables import open_prompts
from detspec.sampling_params import SamplingParams
from tests.jobs.paced import PacedEngine

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"a": None}}]}]
TOKENS = [[1, 2], [3, 4]]


def stream(folder: Path, columns: dict) -> str:
    """An Arrow stream, which holds types that parquet does not."""
    table = pa.table(columns)
    with pa.OSFile(str(folder / "in.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return str(folder / "in.arrow")


def lines(folder: Path, columns: dict, **options) -> list[dict]:
    found = [json.loads(raw) for _, raw in open_prompts(stream(folder, columns), **options).lines()]
    assert [line.pop("id") for line in found if not options] == [f"{i}" for i in range(len(found)) if not options]
    return found


@pytest.mark.parametrize(
    "cells",
    [
        pa.array(["a", "b"], pa.large_string()),
        pa.array(["a", "b"], pa.string_view()),
        pa.array(["a", "b"]).dictionary_encode(),
        compute.run_end_encode(pa.array(["a", "b"])),
    ],
    ids=lambda cells: str(cells.type)[:20],
)
def test_texts_of_all_layouts_are_prompts(cells, tmp_path):
    assert lines(tmp_path, {"prompt": cells}) == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.uint32()),
        pa.large_list(pa.int8()),
        pa.list_(pa.int32(), 2),
        pa.list_view(pa.uint64()),
        pa.large_list_view(pa.int16()),
        pa.list_(pa.dictionary(pa.int8(), pa.int32())),
    ],
    ids=str,
)
def test_token_ids_of_all_layouts_are_plain_integers(kind, tmp_path):
    assert lines(tmp_path, {"prompt": pa.array(TOKENS, kind)}) == [{"prompt_token_ids": ids} for ids in TOKENS]


def test_categories_of_pandas_are_read_from_parquet(tmp_path):
    parquet.write_table(pa.table({"prompt": pa.array(["a", None, "a"]).dictionary_encode()}), tmp_path / "x")
    found = [json.loads(raw)["prompt"] for _, raw in open_prompts(str(tmp_path / "x")).lines()]
    assert found == ["a", None, "a"]


# Conversations ------------------------------------------------------------------------------------------------------------


def call(**arguments) -> list[dict]:
    return [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


def test_objects_lose_the_keys_that_only_others_have(tmp_path):
    calls = [call(city="Bern"), call(unit="c"), call(near={"lat": 1.5}), call(near={"lon": [2]})]
    assert lines(tmp_path, {"messages": calls}) == [{"messages": chat} for chat in calls]


def test_nulls_in_lists_and_maps_stay(tmp_path):
    chats = [call(values=[None, 1]), call(objects=[None, {"x": 1}, {"y": 2}])]
    assert lines(tmp_path, {"messages": chats}) == [{"messages": chat} for chat in chats]
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    maps = pa.array([[[("role", "user"), ("content", "x"), ("name", None)]]], kind)
    assert lines(tmp_path, {"messages": maps}) == [{"messages": [{"role": "user", "content": "x", "name": None}]}]


@pytest.mark.parametrize("column", ["messages", "prompt", "chat"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.json_()], ids=str)
def test_json_texts_are_conversations_with_all_that_they_hold(kind, column, tmp_path):
    cells = pa.array([json.dumps(CHAT), "\n" + json.dumps(CHAT[:1], indent=1)])
    cells = pa.ExtensionArray.from_storage(kind, cells) if kind == pa.json_() else cells.cast(kind)
    found = lines(tmp_path, {column: cells}, column=column)
    assert [line["messages"] for line in found] == [CHAT, CHAT[:1]]


@pytest.mark.parametrize("text", ["[1, 2]", '[{"name": "x"}]', "[{", '{"role": 1}', "[role]", "  ", '"x"', "role: [{"])
def test_texts_that_are_no_conversation_are_prompts(text, tmp_path):
    assert lines(tmp_path, {"prompt": [text, "b"]}) == [{"prompt": text}, {"prompt": "b"}]


HALVES = {
    "a plain text after a conversation": ("prompt", [json.dumps(CHAT), "plain"], 1),
    "a conversation after a plain text": ("prompt", ["plain", json.dumps(CHAT)], 1),
    "a plain text in messages": ("messages", ["plain"], 0),
    "a text of Python": ("prompt", [str(CHAT)], 0),
    "a conversation that ends early": ("prompt", [json.dumps(CHAT)[:-20]], 0),
    "an object that holds one": ("prompt", [json.dumps({"messages": CHAT})], 0),
    "a message alone": ("prompt", [json.dumps(CHAT[0])], 0),
    "a key twice": ("prompt", ['[{"role": "user", "role": "user", "content": "x"}]'], 0),
    "null": ("prompt", [json.dumps(CHAT), None], 1),
}


@pytest.mark.parametrize("half", HALVES)
def test_what_is_half_a_conversation_is_an_error_of_its_row(half, tmp_path):
    column, cells, row = HALVES[half]
    engine = PacedEngine(lambda seconds: None)
    raws = [raw for _, raw in open_prompts(stream(tmp_path, {column: pa.array(cells, pa.string())})).lines()]
    with pytest.raises(InputError, match=r'"messages" must be a list|"messages", one that is not null'):
        parse_request(parse_line(0, raws[row]), engine.model, engine.config, SamplingParams())


MESSAGE = json.dumps(CHAT[0])


@pytest.mark.parametrize("cells", [["plain", MESSAGE], [MESSAGE, MESSAGE]], ids=["after a text", "first"])
def test_text_that_is_one_message_is_refused_with_ways_out_that_work(cells, one_row, tmp_path):
    spec = JobSpec(open_prompts(stream(tmp_path, {"prompt": cells})), SamplingParams(max_tokens=1))
    with (
        pytest.raises(
            InputError, match=r"if it is no conversation, write column 'prompt' as lines .*; if it is one message, put"
        ),
        read_lines(one_row, spec),
    ):
        pass
    line = json.dumps({"id": "a", "prompt": MESSAGE}).encode()
    request = parse_request(parse_line(0, line), one_row.model, one_row.config, SamplingParams(max_tokens=1))
    assert one_row.model.decode(request.prompt_token_ids) == MESSAGE
    assert lines(tmp_path, {"prompt": [f"[{MESSAGE}]"]}) == [{"messages": [CHAT[0]]}]


def test_error_of_a_row_that_is_no_text_has_no_advice_on_texts(tmp_path):
    prompts = open_prompts(stream(tmp_path, {"prompt": ["plain"]}))
    assert [prompts.advice(raw) for _, raw in prompts.lines()] == [""]


def test_conversation_of_texts_is_rendered(one_row, tmp_path):
    model = one_row.model
    object.__setattr__(model, "chat_template", ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}))
    try:
        (raw,) = [raw for _, raw in open_prompts(stream(tmp_path, {"messages": [json.dumps(CHAT[:1])]})).lines()]
        request = parse_request(parse_line(0, raw), model, one_row.config, SamplingParams(max_tokens=4))
    finally:
        object.__setattr__(model, "chat_template", None)
    assert model.decode(request.prompt_token_ids) == "hi"


# What is refused ------------------------------------------------------------------------------------------------------------

MOMENT = datetime.datetime(2026, 1, 1)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([[1.5]], "'prompt' holds list<item: double>; accepted are texts, lists of integers"),
        ([[decimal.Decimal("1.5")]], "'prompt' holds list<item: decimal128"),
        ([[True]], "'prompt' holds list<item: bool>"),
        ([["a"]], "'prompt' holds list<item: string>"),
        ([b"a"], "'prompt' holds binary"),
        ([MOMENT], "'prompt' holds timestamp"),
        ([None], "'prompt' holds null"),
        ([{"role": "user"}], "'prompt' holds struct<"),
        ([[{"role": "user", "at": MOMENT}]], r"prompt\[\]\.at holds timestamp\[us\], which JSON has no value for"),
        ([[{"role": "user", "of": [{"cost": decimal.Decimal("1.5")}]}]], r"prompt\[\]\.of\[\]\.cost holds decimal128"),
        (pa.array([[[(1, "x")]]], pa.list_(pa.map_(pa.int8(), pa.string()))), r"prompt\[\] has keys of type int8"),
        (
            pa.array([[[("x", MOMENT)]]], pa.list_(pa.map_(pa.string(), pa.timestamp("s")))),
            r"prompt\[\]\.\* holds timestamp\[s\]",
        ),
    ],
)
def test_types_that_a_line_cannot_hold_are_named(cells, said, tmp_path):
    with pytest.raises(InputError, match=said):
        open_prompts(stream(tmp_path, {"prompt": cells}))


def test_keys_and_columns_that_occur_twice_are_named(tmp_path):
    twice = pa.StructArray.from_arrays([pa.array(["user"]), pa.array(["x"])], names=["role", "role"])
    chat = pa.ListArray.from_arrays([0, 1], twice)
    with pytest.raises(InputError, match=r"messages\[\] has a key twice: role, role"):
        open_prompts(stream(tmp_path, {"messages": chat}))
    maps = pa.array([[[("role", "user"), ("role", "x")]]], pa.list_(pa.map_(pa.string(), pa.string())))
    with pytest.raises(InputError, match="a map has a key twice: role, role"):
        lines(tmp_path, {"messages": maps})
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pa.OSFile(str(tmp_path / "x"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match="several columns 'prompt'"):
        open_prompts(str(tmp_path / "x"))


def test_text_that_is_no_unicode_is_one_error(tmp_path):
    broken = pa.array([b"a", b"\xff\xfe"]).view(pa.string())
    with pytest.raises(InputError, match="column 'prompt' holds a text that is not UTF-8"):
        lines(tmp_path, {"prompt": broken})


# Ids ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([7, 8], pa.uint32()),
        pa.array(["7", "8"]).dictionary_encode(),
        pa.array([7, 8], pa.uint64()).dictionary_encode(),
    ],
    ids=lambda ids: str(ids.type)[:40],
)
def test_ids_are_texts_or_integers(ids, tmp_path):
    found = lines(tmp_path, {"prompt": ["a", "b"], "key": ids}, id_column="key")
    assert [line["id"] for line in found] == ["7", "8"]


@pytest.mark.parametrize("ids", [[1.0, 2.0], [True, False], [MOMENT, MOMENT], [[1], [2]]], ids=str)
def test_ids_of_other_types_are_refused(ids, tmp_path):
    with pytest.raises(InputError, match=r"column 'key' holds .*; accepted as ids are texts and integers"):
        lines(tmp_path, {"prompt": ["a", "b"], "key": ids}, id_column="key")
