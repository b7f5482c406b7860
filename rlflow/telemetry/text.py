"""Text of a model, made safe and short for people to look at. Pure."""

import math
import unicodedata

_JOINERS = frozenset("\u200c\u200d")
"""Format characters that scripts and emoji need and that cannot reorder or hide text."""


def printable(text: str) -> str:
    """The text with control characters, direction overrides and lone surrogates written out as escapes.

    Model output must not move the cursor, colour the terminal or reverse what follows. Newlines stay, tabs become
    spaces.
    """
    return "".join(_shown(character) for character in text.replace("\r\n", "\n"))


def _shown(character: str) -> str:
    if character == "\n" or character in _JOINERS:
        return character
    if character == "\t":
        return "    "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def shorten(text: str, max_characters: int) -> str:
    """The start and the end of a text that is too long, and how much was left out between them."""
    if len(text) <= max_characters:
        return text
    head = max_characters * 2 // 3
    tail = max_characters - head
    return f"{text[:head]} [... {len(text) - max_characters} characters cut ...] {text[len(text) - tail :]}"


def number(value: float | int | None) -> str:
    """A number for people, three digits of it: "0.532", "1.2e-05", "13.4k"; "-" for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for scale, unit, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if least <= size < 1e13:
            return f"{value / scale:.1f}{unit}"
    if size < 1e4 and value == int(value):
        return str(int(value))
    if size < 1e-3 or size >= 1e13:
        return f"{value:.2g}"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"


def percent(share: float | int | None) -> str:
    """A share for people: "25%"; "-" for None."""
    return "-" if share is None else f"{share:.0%}"


def duration(seconds: float) -> str:
    """A time for people: "8.4 s", "4m 41s", "3h 05m", "2d 04h"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
