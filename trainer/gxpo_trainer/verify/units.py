"""Units and counted things behind a number: `5 cm^2`, `12 dogs`, `30 m/s`. The number is the answer."""

from __future__ import annotations

import re

_WORDS = frozenset(
    re.findall(
        r"[A-Za-z]+",
        "mm cm dm km nm um in ft yd mi kg mg lb lbs oz ml mL dl hr hrs min mins sec secs ms ns us am pm mph kph "
        "kmh rpm yr yrs day days hour hours minute minutes second seconds week weeks month months year years deg "
        "rad sq cu unit units meter meters metre metres inch inches foot feet yard yards mile miles gram grams "
        "cent cents dollar dollars pound pounds ounce ounces liter liters litre litres gallon gallons cup cups "
        "pint pints quart quarts acre acres square cubic per of the Hz kHz MHz GHz kW MW kJ kPa Pa atm mol eV keV "
        "MeV GeV pc kpc Mpc AU ly erg dyn dyne people ways times points sides men boys girls bags pens cars jobs "
        "eggs",
    )
)
_SINGLE = frozenset(["m", "s", "g", "h", "L", "J", "N", "W", "K", "V"])
POWER_OF_TEN = re.compile(r"10\s*\^\s*\{[-+]?[0-9]+\}\s*$")
"""How a number in scientific notation ends."""
_LAST_WORD = re.compile(r"(?P<sep>[\s/]*)(?P<word>(?<![A-Za-z\\])[A-Za-z]+)(?:\s*\^\s*(?:\{-?[0-9]+\}|-?[0-9]))?\s*$")


def drop_units(s: str) -> str:
    """The answer without unit words at its end; unchanged when nothing mathematical would be left."""
    rest = s
    while (match := _LAST_WORD.search(rest)) is not None:
        before = rest[: match.start()]
        if not re.search(r"[0-9]", before) or not _is_unit(match["word"], match["sep"], before):
            break
        rest = before.rstrip(" /")
    return rest


def _is_unit(word: str, separator: str, before: str) -> bool:
    """Known units; single-letter units behind a blank; any long word with a vowel behind a blank (`5 apples`)."""
    if word in _WORDS:
        return before[-1:].isdigit() or separator != "" or before[-1:] in ")}"
    if separator == "":
        return False
    if word in _SINGLE:
        quantity = before.rstrip()[-1:].isdigit() or POWER_OF_TEN.search(before) is not None
        return quantity or separator.strip() == "/"
    return len(word) >= 4 and re.search("[aeiouyAEIOUY]", word) is not None
