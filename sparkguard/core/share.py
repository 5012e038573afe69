"""Shares, exactly: a share is an int of billionths of a pool, so that 0.10 + 0.70 is 0.80 and never 0.7999999.

A text with more than nine decimals is rounded up: a reservation is never counted smaller than it is.
"""

from __future__ import annotations

WHOLE = 1_000_000_000
_DIGITS = 9


def parse_share(text: str) -> int:
    """Reads a decimal number the way Python's float() does ('.4', '4e-1', ' 0.4 '), without a float in between.

    Raises ValueError for what is no plain decimal number (nan, inf, '40%', '0,4', '0_4', '').
    The range is not checked: a running server's nonsense is the caller's to judge.
    """
    body = text.strip().lower()
    sign = -1 if body[:1] == "-" else 1
    mantissa, e, exponent = body.lstrip("+-").partition("e") if body[:2] not in ("+-", "-+", "--", "++") else ("", "", "")
    whole, _, fraction = mantissa.partition(".")
    digits = whole + fraction
    power = exponent.lstrip("+-") if exponent[1:2] not in ("+", "-") else ""
    if not (digits.isascii() and digits.isdigit()) or (e and not (power.isascii() and power.isdigit() and len(power) < 4)):
        raise ValueError(text)
    shift = _DIGITS - len(fraction) + (int(power) * (-1 if exponent[:1] == "-" else 1) if e else 0)
    value: int = int(digits) * 10**shift if shift >= 0 else -(-int(digits) // 10**-shift)
    return sign * value


def format_share(share: int) -> str:
    """'0.80', '0.125': at least two decimals, no more than needed."""
    sign = "-" if share < 0 else ""
    whole, rest = divmod(abs(share), WHOLE)
    return f"{sign}{whole}.{str(rest).zfill(_DIGITS).rstrip('0').ljust(2, '0')}"


def brief_share(share: int) -> str:
    """For prose about a measured or derived share: two decimals, rounded up ('0.23')."""
    return format_share(-(-share // 10_000_000) * 10_000_000)


def floor_share(share: int) -> int:
    """The largest share with two decimals that is not above this one: what a person would type."""
    return share // 10_000_000 * 10_000_000


def bytes_of(share: int, total_bytes: int) -> int:
    """Bytes of a share of a pool, rounded up."""
    return -(-share * total_bytes // WHOLE)


def share_of(amount_bytes: int, total_bytes: int) -> int:
    """Share that an amount is of a pool, rounded up."""
    return -(-amount_bytes * WHOLE // total_bytes)
