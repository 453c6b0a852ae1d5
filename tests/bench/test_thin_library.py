"""The code of one architecture stays as it is, that of the others becomes zeros, nothing else changes."""
import struct

import pytest
from thin_library import MAGIC, main, thin


def entry(architecture, code):
    head = struct.pack("<HHIQ", 2, 1, 64, len(code)).ljust(28, b"\x01") + struct.pack("<I", architecture)
    return head.ljust(64, b"\x02") + code


def container(*entries):
    body = b"".join(entries)
    return MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def library():
    other = MAGIC + b"no container"
    two, one = container(entry(80, b"a" * 40), entry(90, b"b" * 24)), container(entry(100, MAGIC * 2))
    return b"ELF" + two + other + one + b"end"


def test_one_architecture_is_left():
    whole = library()
    thinned = bytearray(whole)
    assert thin(thinned, 90) == 48
    assert len(thinned) == len(whole) and b"b" * 24 in thinned and b"a" * 40 not in thinned
    assert bytes(thinned) == whole.replace(b"a" * 40, bytes(40)).replace(MAGIC * 2, bytes(8))


def test_no_such_architecture_is_an_error_and_nothing_is_written(tmp_path):
    (tmp_path / "a.so").write_bytes(library())
    with pytest.raises(SystemExit, match="a.so: no code for architecture 75"):
        main([str(tmp_path / "a.so"), str(tmp_path / "b.so"), "--architecture", "75"])
    assert not (tmp_path / "b.so").exists()
    assert main([str(tmp_path / "a.so"), str(tmp_path / "b.so"), "--architecture", "100"]) == 0
    assert MAGIC * 2 in (tmp_path / "b.so").read_bytes()
