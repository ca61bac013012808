"""Malformed answers of a host: bytes by a phrase for the defect, such as ``a tar of a device``."""

from __future__ import annotations

import io
import struct
import tarfile

RUN = "20260102-150405-hello-3fa2"


def tar(*members: tuple[str, bytes, int], content: bytes = b"") -> bytes:
    """Build a tar of headers (name, type, declared size), each followed by ``content`` whatever its length."""
    stream = io.BytesIO()
    for name, kind, size in members:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, size
        stream.write(info.tobuf(tarfile.GNU_FORMAT) + content)
    return stream.getvalue() + b"\0" * 1024


def sparse() -> bytes:
    """Build a short tar whose sparse member has an apparent size of 1 TiB."""
    header = bytearray(tarfile.TarInfo("loss").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:410] = b"%011o\0%011o\0" % (1 << 20, 0)
    header[483:495] = b"\x80" + struct.pack(">Q", 1 << 40).rjust(11, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"\0" * 1024


PAX = b"30 GNU.sparse.major=1\n30 GNU.sparse.minor=0\n"
ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "an end of line": b"\n",
    "many ends of lines": b"\n" * 100_000,
    "a zero byte": b"\0",
    "zero bytes": b"\0" * 100_000,
    "one word": b"many",
    "a long word": b"1: " + b"a" * 1_000_000 + b"\n",
    "not UTF-8": b"\xff\xfe\n" * 100,
    "an escape sequence": b"\x1b[2J\x1b]0;title\x07\n",
    "a carriage return": b"loss\rerror: all is well\n",
    "a negative number": b"-1\n",
    "a number of 5000 digits": b"9" * 5000 + b"\n",
    "not a number": b"nan\n",
    "a number with a sign": b"+0x10\n",
    "an empty object": b"{}\n",
    "an empty list": b"[]\n",
    "null": b"null\n" * 5,
    "a deep list": b"[" * 100_000 + b"\n",
    "a deep object": b'{"a":' * 50_000 + b"\n",
    "four lines": b"a b c\nroot\nroot\n[]\n",
    "lines of JSON": b'a b c\n\n\n{"RootFS": 7}\n[1, {"a": 2}]\n',
    "a list for an object": b"a b c\n/ 1 2 3 4 5\n/ 1 2 3 4 5\n[1]\n[]\n",
    "words for a number": b"a b c\n/ x y z w v u\n/ x y z w v u\n\n[]\n",
    "an absolute name": b"/home/me\n",
    "a name that leads out": b"../../../home/me\n",
    "a name that leads out later": f"{RUN}/../../../x\n".encode(),
    "a hidden name": b".ssh\n",
    "an unknown run": b"20260101-000000-forged-0000\n",
    "a name of 4 KiB": b"n" * 4096 + b"\n",
    "a name with control characters": b"\x1b[31mred\x07\n",
    "100,000 names": b"".join(b"%06d\n" % number for number in range(100_000)),
    "one fact": b"fact machine\n1 x\n1 end\n",
    "a fact without an end": b"fact time\n1 12\n",
    "an end alone": b"end\n",
    "an odd time": b"fact time\n1\tmany\nend\n",
    "an odd file": b"file /proc/meminfo\n1\tMemTotal: many kB\nend\n",
    "an odd user": b"fact user\n1\tann ann ann\nend\n",
    "a huge core number": b"file /sys/devices/system/cpu/online\n1\t0-99999999999\nend\n",
    "names without an end": b"./a\0./b\0",
    "too few facts": b"./.current\0\0a\0\0b\0\0\0\0" + b"81a4 12\n\0" + b"x\0",
    "an odd mode": b"./.current\0\0a\0\0b\0\0\0\0zzzz\n\x0081a4 many\n\0" + b"0" * 64 + b"  b\n\0",
    "an odd size": b"./.current\0\0\0b\0\0\0\x0081a4 -9\n\0" + b"0" * 64 + b"  b\n\0",
    "a tar that breaks off": tar(("loss", tarfile.REGTYPE, 1 << 20))[:700],
    "a tar of a device": tar(("null", tarfile.CHRTYPE, 0)),
    "a tar of an absolute name": tar(("/etc/passwd", tarfile.REGTYPE, 0)),
    "a tar of a name that leads out": tar(("a/../../x", tarfile.REGTYPE, 0)),
    "a tar of an unknown type": tar(("x", b"Z", 0)),
    "a sparse file of 1 TiB": sparse(),
    "a sparse file by other means": tar(("x", tarfile.XHDTYPE, len(PAX)), content=PAX.ljust(512, b"\0")),
    "a name of 8 GiB": tar(("././@LongLink", tarfile.GNUTYPE_LONGNAME, 8 << 30), content=b"n" * (6 << 20)),
    "a link name of 8 GiB": tar(("././@LongLink", tarfile.GNUTYPE_LONGLINK, 8 << 30), content=b"n" * (6 << 20)),
    "headers without a member": tar(
        *[("x", tarfile.XGLTYPE, 512)] * 12_000, content=b"11 comment=\n".ljust(512, b"\0")
    ),
    "a size below zero": tar(("x", tarfile.REGTYPE, 0)).replace(b"00000000000\0", b"-0000000001\0", 1),
    "more than is answered": b"x" * 300_000,
}
