"""What a Mach-O file for arm64 asks of others: its libraries, and each import with its library."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_MAGIC, _FAT = 0xFEEDFACF, 0xCAFEBABE
_ARM64 = 0x0100000C
_SYMTAB, _CODE_SIGNATURE, _BUILD_VERSION = 0x2, 0x1D, 0x32
_DYLIBS = {0xC, 0x80000018, 0x8000001F, 0x80000023}  # load, weak, re-export, upward
_DYNAMIC_LOOKUP = 254
_FILE_TYPES = {6: "dylib", 8: "bundle"}

# The library of an import that the loader looks for in the whole process: Python's.
ANYWHERE = ""


@dataclass
class Binary:
    kind: str
    minimum: str  # macOS version
    signed: bool
    libraries: list[str]
    imports: dict[str, str]  # symbol: library


def _version(packed: int) -> str:
    return f"{packed >> 16}.{packed >> 8 & 255}"


def read(data: bytes) -> Binary:
    """Read a file's arm64 part.

    Raises:
        ValueError: It is not such a file.
    """
    if struct.unpack_from(">I", data)[0] == _FAT:
        (count,) = struct.unpack_from(">I", data, 4)
        parts = (struct.unpack_from(">IIIII", data, 8 + 20 * i) for i in range(count))
        ours = [data[at : at + size] for cpu, _, at, size, _ in parts if cpu == _ARM64]
        data = ours[0] if ours else bytes(32)
    magic, cpu, _, kind, commands = struct.unpack_from("<IIIII", data)
    if (magic, cpu) != (_MAGIC, _ARM64):
        raise ValueError("not a Mach-O file for arm64")
    binary = Binary(_FILE_TYPES.get(kind, str(kind)), "", False, [], {})
    table = (0, 0, 0, 0)
    at = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, at)
        if command in _DYLIBS:
            (name,) = struct.unpack_from("<I", data, at + 8)
            binary.libraries.append(data[at + name : at + size].split(b"\0")[0].decode())
        elif command == _SYMTAB:
            table = struct.unpack_from("<IIII", data, at + 8)
        elif command == _BUILD_VERSION:
            binary.minimum = _version(struct.unpack_from("<I", data, at + 12)[0])
        elif command == _CODE_SIGNATURE:
            binary.signed = True
        at += size
    symbols, count, strings, _ = table
    for i in range(count):
        name, kind, _, flags, _ = struct.unpack_from("<IBBHQ", data, symbols + 16 * i)
        # Undefined and external, and not a debugger's note.
        if kind & 0xE0 or kind & 0x0E or not kind & 1:
            continue
        start = strings + name
        symbol = data[start : data.index(b"\0", start)].decode()
        library = flags >> 8
        binary.imports[symbol] = (
            ANYWHERE if library == _DYNAMIC_LOOKUP else binary.libraries[library - 1]
        )
    return binary
