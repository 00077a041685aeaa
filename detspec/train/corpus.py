"""Training documents, read in a fixed order and split by a hash of their names, and the tokenizer trained on them."""

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from detspec.errors import InputError

EOS = "<|endoftext|>"
EOS_ID = 0
STDLIB = "python_stdlib"

# Folders of the standard library that hold tests, third-party code, or tables of data.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__", "ensurepip", "lib-dynload"}
)
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "__phello__")
MAX_DOCUMENT_BYTES = 400_000

# A piece is a word with the space before it, up to three digits, punctuation, or a newline with the indentation after it.
# The last space of an indentation belongs to the next word:   "x = 1\n    if y"  ->  "x" " =" " " "1" "\n   " " if" " y"
SPLIT_PATTERN = r" ?[A-Za-z_]+| ?[^\s\w]+|[\r\n]+ *(?= \S)|[\r\n]+\s*|\d{1,3}| +(?= \S)|\s+| ?\w+"


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, and its path relative to the corpus, which is the same on every machine."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in the order of their names; `heldout` is never trained on."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]


def read_corpus(corpus: str, holdout_one_in: int) -> Corpus:
    """Reads the corpus that a config names. Raises `InputError` if the folder is missing or one side of the split is empty."""
    root = Path(sysconfig.get_path("stdlib")) if corpus == STDLIB else Path(corpus)
    if not root.is_dir():
        raise InputError(f"corpus {corpus!r} is neither {STDLIB!r} nor a folder")
    documents = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.suffix not in (".py", ".txt") or (corpus == STDLIB and is_skipped(relative)) or not path.is_file():
            continue
        content = path.read_bytes()
        if not content.strip() or len(content) > MAX_DOCUMENT_BYTES:
            continue
        try:
            documents.append(Document(relative.as_posix(), content.decode("utf-8")))
        except UnicodeDecodeError:
            continue
    heldout = tuple(document for document in documents if is_heldout(document.name, holdout_one_in))
    train = tuple(document for document in documents if not is_heldout(document.name, holdout_one_in))
    if not train or not heldout:
        raise InputError(f"corpus {corpus!r} at {root}: {len(train)} documents to train on, {len(heldout)} held out; need both")
    return Corpus(train, heldout)


def is_skipped(relative: Path) -> bool:
    """Whether this file of the standard library is left out of the corpus."""
    return (
        relative.suffix != ".py"
        or not SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1])
        or any(part.startswith(SKIPPED_PREFIXES) for part in relative.parts)
    )


def is_heldout(name: str, holdout_one_in: int) -> bool:
    """Whether the thing called `name` is held out; what else there is does not change it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()) % holdout_one_in == 0


def train_tokenizer(documents: tuple[Document, ...], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE without a normaliser, so that decoding returns the exact text. `EOS`, between documents, is id 0."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer
