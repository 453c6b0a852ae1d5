"""Makes a CUDA library small to carry: the code of all architectures but one becomes zeros, which xz takes to nothing.

    python scripts/bench/thin_library.py libtransformer_engine.so thin.so --architecture 90
    xz -T0 -3 thin.so       # 690 MiB of Transformer Engine 2.17 become 17

The library loads and runs as before on a device of that architecture, and on no other.
"""
from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

# As cuobjdump reads them: a container begins with magic number, version, bytes of its header, bytes of what follows;
# each entry in it with kind and version, bytes of its header, bytes of its code, and at byte 28 the architecture.
MAGIC, CONTAINER, ENTRY, ARCHITECTURE_AT = b"\x50\xed\x55\xba", "<4xHHQ", "<HHIQ", 28


def thin(library: bytearray, architecture: int) -> int:
    """Returns the bytes that are zeros now. Raises ValueError if there is no code of that architecture."""
    zeroed, kept, at = 0, False, 0
    while (at := library.find(MAGIC, at)) >= 0:
        version, header, size = struct.unpack_from(CONTAINER, library, at)
        if (version, header) != (1, 16):  # the same four bytes, and no container
            at += len(MAGIC)
            continue
        at += header
        end = at + size
        while at < end:
            _, _, header, size = struct.unpack_from(ENTRY, library, at)
            (found,) = struct.unpack_from("<I", library, at + ARCHITECTURE_AT)
            kept |= found == architecture
            if found != architecture:
                library[at + header : at + header + size] = bytes(size)
                zeroed += size
            at += header + size
    if not kept:
        raise ValueError(f"no code for architecture {architecture}")
    return zeroed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", type=int, required=True, help="90 for H100 and H200")
    args = parser.parse_args(argv)
    library = bytearray(args.library.read_bytes())
    try:
        zeroed = thin(library, args.architecture)
    except ValueError as error:
        sys.exit(f"{args.library}: {error}")
    args.out.write_bytes(library)
    print(f"{zeroed >> 20} of {len(library) >> 20} MiB are zeros now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
