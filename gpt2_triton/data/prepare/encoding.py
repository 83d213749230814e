"""Names the likely encoding of text that is not UTF-8, and the command that converts it.

    byte-order mark                        UTF-16 or UTF-32
    zeros at every other byte              UTF-16LE or UTF-16BE
    more characters of UTF-8 than errors   UTF-8, damaged
    Japanese, Korean, Chinese              the encoding that decodes without an error to the script's common characters
    several high bytes in a row            Cyrillic: CP1251 or KOI8-R, by the letters that are lower case
    the rest                               CP1252, or ISO-8859-1 if CP1252 lacks one of the bytes

The names are iconv's and Python's.
"""

import codecs
import re
import shlex
from pathlib import Path

BOMS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16's, with which it begins
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
SCRIPTS = (  # encoding, common characters, their least share among all that are not ASCII
    ("EUC-JP", r"[ぁ-ん]", 0.2),
    ("CP932", r"[ぁ-ん]", 0.2),
    ("EUC-KR", r"[가-힣]", 0.8),
    ("GB18030", r"[的一是不了人我在有他这中大来上国为之名道,。、]", 0.1),
    ("BIG5", r"[的一是不了人我在有他這中大來上國為之名道，。、]", 0.1),
)
SAMPLE = 1 << 16
NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def likely_encoding(data: bytes, at: int) -> str:
    """Return the likely encoding of text whose byte `at` is not UTF-8; "UTF-8" if few of its bytes are damaged."""
    for bom, name in BOMS.items():
        if data.startswith(bom):
            return name
    zeros = [half.count(0) / max(1, len(half)) for half in (data[:SAMPLE:2], data[1:SAMPLE:2])]
    if max(zeros) > 0.2:
        return "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
    others = NOT_ASCII.findall(data.decode(errors="replace"))
    if 2 * others.count("\N{REPLACEMENT CHARACTER}") < len(others):
        return "UTF-8"
    sample = data[data.rfind(b"\n", 0, at) + 1 :][:SAMPLE]
    for name, common, share in SCRIPTS:
        if _share(sample, name, common) >= share:
            return name
    runs = re.findall(rb"[\x80-\xff]+", sample)
    if sum(map(len, runs)) >= 3 * len(runs):
        shares = {name: _share(sample, name, "[а-яё]") for name in ("CP1251", "KOI8-R")}
        if max(shares.values()) > 0.5:
            return max(shares, key=lambda name: shares[name])
    return "CP1252" if _decoded(data[at:], "CP1252") else "ISO-8859-1"


def _share(data: bytes, encoding: str, common: str) -> float:
    """Return the share of the `common` characters among those that are not ASCII; 0 if the bytes do not decode."""
    text = _decoded(data, encoding)
    return len(re.findall(common, text)) / max(1, len(NOT_ASCII.findall(text)))


def _decoded(data: bytes, encoding: str) -> str:
    """Return the text, without a character that is cut at the end; "" if the bytes are not in this encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        return ""


def conversion(path: Path, encoding: str) -> str:
    """Return the shell command that writes a file in UTF-8 next to `path`, under a name that `prepare` takes."""
    stem, dot, suffixes = path.name.rpartition(".jsonl" if ".jsonl" in path.name else ".txt")
    source, target = shlex.quote(str(path)), shlex.quote(str(path.with_name(f"{stem}.utf8{dot}{suffixes}")))
    iconv = f"iconv{' -c' if encoding == 'UTF-8' else ''} -f {encoding} -t UTF-8"
    return f"gzip -dc {source} | {iconv} | gzip > {target}" if suffixes == ".gz" else f"{iconv} {source} > {target}"
