"""Link arguments of the library, and the checks after linking.

PyTorch's libraries use the shared libstdc++. A compiler whose search path has ``libstdc++.a`` before ``libstdc++.so`` links a
second copy into an extension. The process then crashes when one copy uses an object of the other, for example at the first
error message with a number.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import NamedTuple

from build_backend import stop

ROOT = Path(__file__).parent.resolve()
LIBSTDCXX = "libstdc++.so.6"

SHT_DYNAMIC, SHT_DYNSYM = 6, 11
DT_NEEDED = 1
STB_LOCAL = 0
STV_DEFAULT, STV_PROTECTED = 0, 3

# Functions, variables, vtables, typeinfo and guards of namespace std, in the mangling of the Itanium C++ ABI: std:: is "St";
# std::allocator, basic_string, string, istream, ostream and iostream are "Sa", "Sb", "Ss", "Si", "So" and "Sd".
STD_SYMBOL = re.compile(r"_Z(T[VTIS]|T[hvc][n\d_]*|GV|Z)*N?[rVKRO]*S[tabsiod]")


# Precedes the -lstdc++ that the driver appends, so that no symbol is left for that one to resolve.
SHARED_LIBSTDCXX = ("-Wl,--push-state,--no-as-needed", f"-l:{LIBSTDCXX}", "-Wl,--pop-state")


def link_arguments(exports: str) -> list[str]:
    """Arguments of the compiler driver for linking one library.

    Args:
        exports: name of the version script in ``csrc/`` that lists the symbols that other libraries see.
    """
    return [
        *SHARED_LIBSTDCXX,
        # -fvisibility=hidden alone exports std:: templates: libstdc++'s headers declare the whole namespace visible.
        f"-Wl,--version-script={ROOT / 'csrc' / exports}",
        "-Wl,-s",
    ]


class SharedLibrary(NamedTuple):
    needed: list[str]  # names of the libraries that the loader loads with this one
    exported: list[str]  # defined symbols that other libraries can bind to


def read_shared_library(path: Path) -> SharedLibrary:
    """Reads the dynamic section and symbols of a 64-bit ELF file, because not every compiler comes with readelf and nm."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:5] != b"\x7fELF\x02":
            stop(f"expected {path} to be a 64-bit ELF library, got a file that begins with {data[:5]!r}.")
        order = "<" if data[5] == 1 else ">"

        def string_at(offset: int) -> str:
            return data[offset : data.find(b"\0", offset)].decode()

        def entries(section: tuple[int, ...], layout: str) -> list[tuple[int, ...]]:
            _, _, _, _, offset, size, *_ = section
            return list(struct.iter_unpack(order + layout, data[offset : offset + size]))

        (table,) = struct.unpack_from(order + "Q", data, 0x28)
        entry_size, count = struct.unpack_from(order + "HH", data, 0x3A)
        # name, type, flags, address, offset, size, index of the string table, ...
        sections = [struct.unpack_from(order + "IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)]
        needed, exported = [], []
        for section in sections:
            strings = sections[section[6]][4]
            if section[1] == SHT_DYNAMIC:
                needed += [string_at(strings + value) for tag, value in entries(section, "QQ") if tag == DT_NEEDED]
            elif section[1] == SHT_DYNSYM:
                for name, info, other, defined_in, _, _ in entries(section, "IBBHQQ"):
                    if defined_in and info >> 4 != STB_LOCAL and other & 3 in (STV_DEFAULT, STV_PROTECTED):
                        exported.append(string_at(strings + name))
    return SharedLibrary(needed, exported)


def check_library(path: Path, compiler: str) -> None:
    """Stops the build, and removes the library, unless libstdc++ is shared with the rest of the process.

    Args:
        path: the library.
        compiler: the command that linked it, for the message.
    """
    library = read_shared_library(path)
    copied = [name for name in library.exported if STD_SYMBOL.match(name)]
    if LIBSTDCXX in library.needed and not copied:
        return
    # A remaining library could be imported, and the next build would consider it up to date.
    path.unlink()
    found = f"it exports {len(copied)} symbols of std::" if copied else "it was linked statically"
    stop(
        f"expected {path.name} to use the shared {LIBSTDCXX}, as PyTorch does, but {found}. Two copies of libstdc++ in one "
        f"process crash when an error message is formatted. '{compiler}' linked it: remove -static-libstdc++, -lstdc++ and "
        "folders with a libstdc++.a from the environment variables CXX, LDFLAGS, LDSHARED and LIBRARY_PATH, and rebuild."
    )
