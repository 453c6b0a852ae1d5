"""Text -> the .bin/.idx pair that Megatron reads: ``--data-path PREFIX``.

    python prepare_text.py --output data/topics                    # English prose that every Python ships
    python prepare_text.py --output data/mine book.txt notes/      # files, or all text files of a folder

Tokens are bytes (``--tokenizer-type NullTokenizer --vocab-size 256``) or those of a SentencePiece model
(``--sentencepiece MODEL``). One file, or one topic of the default, is one document.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

BYTE_VOCABULARY = 256
_BINARY_PROBE_BYTES = 4096  # a NUL in them: not text

Encode = Callable[[bytes], "Sequence[int] | np.ndarray"]


class InputError(ValueError):
    """What the user gave cannot be prepared; the message says why."""


def default_corpus() -> Iterator[bytes]:
    """The texts behind Python's ``help("topics")``: about 0.7 MB of English prose."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name].encode()


def files_of(path: Path) -> list[Path]:
    """The file, or the folder's files in name order without hidden ones. InputError if there is no such path."""
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file())
        return sorted(file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts))
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    return [path]


def read_documents(paths: Sequence[Path]) -> Iterator[bytes]:
    """The texts of the paths. Binary files in a folder are skipped, one named outright is an InputError."""
    for path in paths:
        for file in files_of(path):
            try:
                text = file.read_bytes()
            except OSError as error:
                raise InputError(f"{file}: {error.strerror}") from error
            if b"\0" in text[:_BINARY_PROBE_BYTES]:
                if file == path:
                    raise InputError(f"{file}: not a text file (it has NUL bytes)")
                continue
            yield text


def sentencepiece_encoder(model: Path) -> tuple[Encode, int]:
    """The model's encoder and its vocabulary size."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise InputError("--sentencepiece needs the package: pip install sentencepiece") from error
    if not model.is_file():
        raise InputError(f"--sentencepiece {model}: no such file")
    processor = SentencePieceProcessor(model_file=str(model))
    return (lambda text: processor.encode(text.decode(errors="replace"))), processor.vocab_size()


def bytes_encoder() -> tuple[Encode, int]:
    return (lambda text: np.frombuffer(text, dtype=np.uint8)), BYTE_VOCABULARY


def write_dataset(prefix: Path, documents: Iterator[bytes], encode: Encode, vocabulary: int) -> tuple[int, int]:
    """Write PREFIX.bin and PREFIX.idx; returns the number of documents and of tokens. InputError if there are none."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    data = prefix.with_name(prefix.name + ".bin")
    builder = IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(vocabulary))
    documents_written = tokens_written = 0
    for text in documents:
        tokens = np.asarray(encode(text), dtype=np.int64)
        if tokens.size:
            builder.add_item(torch.from_numpy(tokens))
            builder.end_document()
            documents_written += 1
            tokens_written += tokens.size
    if not tokens_written:
        builder.data_file.close()
        data.unlink()
        raise InputError("no text in the input: all files are empty or binary")
    builder.finalize(str(prefix.with_name(prefix.name + ".idx")))
    return documents_written, tokens_written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="text files or folders")
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--sentencepiece", type=Path, metavar="MODEL", help="tokenize with this model instead of bytes")
    options = parser.parse_args(arguments)
    try:
        encode, vocabulary = sentencepiece_encoder(options.sentencepiece) if options.sentencepiece else bytes_encoder()
        documents = read_documents(options.paths) if options.paths else default_corpus()
        count, tokens = write_dataset(options.output, documents, encode, vocabulary)
    except InputError as error:
        print(f"prepare_text: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {count} documents, {tokens} tokens, vocabulary {vocabulary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
