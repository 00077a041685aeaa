"""The corpus: a fixed order, a split by name, a tokenizer that returns the very text."""

from pathlib import Path

import pytest

from detspec.errors import InputError
from detspec.train.corpus import EOS, EOS_ID, Document, is_heldout, is_skipped, read_corpus, train_tokenizer


def write_corpus(root: Path, count: int = 12) -> Path:
    (root / "pkg").mkdir(parents=True)
    for i in range(count):
        lines = "".join(f"    if n == {j}:\n        return value_{i} + {j * i}\n\n" for j in range(12))
        (root / ("pkg" if i % 2 else ".") / f"module_{i}.py").write_text(f"def function_{i}(n):\n{lines}")
    return root


def test_corpus_is_ordered_by_name_and_split_by_it(tmp_path: Path):
    corpus = read_corpus(str(write_corpus(tmp_path)), holdout_one_in=3)
    train, heldout = ([document.name for document in part] for part in (corpus.train, corpus.heldout))
    assert train == sorted(train)
    assert len(train) + len(heldout) == 12
    assert all(is_heldout(name, 3) for name in heldout)
    assert not any(is_heldout(name, 3) for name in train)


def test_another_document_moves_none_across_the_split(tmp_path: Path):
    before = read_corpus(str(write_corpus(tmp_path)), holdout_one_in=3)
    (tmp_path / "aaa.py").write_text("pass\n")
    after = read_corpus(str(tmp_path), holdout_one_in=3)
    assert {document.name for document in before.heldout} <= {document.name for document in after.heldout}
    assert {document.name for document in before.train} <= {document.name for document in after.train}


def test_unreadable_and_empty_documents_are_left_out(tmp_path: Path):
    write_corpus(tmp_path)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "empty.py").write_text("\n")
    corpus = read_corpus(str(tmp_path), holdout_one_in=3)
    assert len(corpus.train) + len(corpus.heldout) == 12


def test_missing_or_one_sided_corpus_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="neither 'python_stdlib' nor a folder"):
        read_corpus(str(tmp_path / "nowhere"), holdout_one_in=3)
    write_corpus(tmp_path)
    with pytest.raises(InputError, match="0 documents to train on, 12 held out"):
        read_corpus(str(tmp_path), holdout_one_in=1)


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("functools.py", False),
        ("asyncio/events.py", False),
        ("unittest/mock.py", False),
        ("test/test_int.py", True),
        ("lib2to3/tests/data/bom.py", True),
        ("site-packages/jax/__init__.py", True),
        ("encodings/cp037.py", True),
        ("pydoc_data/topics.py", True),
        ("_sysconfigdata__linux_x86_64-linux-gnu.py", True),
        ("LICENSE.txt", True),
    ],
)
def test_tests_tables_and_packages_of_the_library_are_skipped(name: str, skipped: bool):
    assert is_skipped(Path(name)) is skipped


def test_tokenizer_returns_the_very_text_and_joins_newline_with_indentation():
    text = "class A:\n    def f(self, x):\n        return x + 1\n" * 20
    tokenizer = train_tokenizer((Document("a.py", text),), vocab_size=300)
    assert tokenizer.token_to_id(EOS) == EOS_ID
    for sample in (text, "\tx  =\r\n\n   y ½漢\U0001f600  ", "   ", "a\n\n\n        b", "1234567"):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample
    assert len(tokenizer.encode("\n        return").ids) == 2
