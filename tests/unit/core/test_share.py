"""Shares are exact: what float() accepts is read without a float, and nothing is ever counted smaller than it is."""

from __future__ import annotations

import decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.share import WHOLE, brief_share, bytes_of, floor_share, format_share, parse_share, share_of

decimal.getcontext().prec = 60

READ = {
    "plain": ("0.40", 400_000_000),
    "no zero before the point": (".4", 400_000_000),
    "nothing after the point": ("1.", WHOLE),
    "whole": ("1", WHOLE),
    "exponent": ("4e-1", 400_000_000),
    "capital exponent with a sign": ("0.04E+1", 400_000_000),
    "blanks around": (" 0.4 ", 400_000_000),
    "a line's end": ("0.4\r\n", 400_000_000),
    "plus": ("+0.4", 400_000_000),
    "negative": ("-0.5", -500_000_000),
    "zero": ("0", 0),
    "above one": ("1.5", 1_500_000_000),
    "nine decimals": ("0.123456789", 123_456_789),
    "more than nine decimals, rounded up": ("0.1234567891", 123_456_790),
    "all that is lost, rounded up": ("1e-300", 1),
    "many zeros": ("0." + "4" + "0" * 50, 400_000_000),
}
NO_NUMBER = [
    "", " ", ".", "-", "+", "e5", "1e", "1e+", "1e+-5", "1e5-", "1.2.3", "0,4", "40%", "0_4", "0x1", "nan", "inf", "-inf",
    "infinity", "--5", "+-5", "- 5", "0. 4", "0.5 e1", "1e5e5", "1e9999", "\u0664", "\uff11", "0.4\x00", "half",
]  # fmt: skip


@pytest.mark.parametrize(("text", "share"), READ.values(), ids=READ)
def test_reads_what_vllm_reads(text: str, share: int) -> None:
    """A spelling that vLLM's float() accepts is read as the number it means."""
    assert parse_share(text) == share


@pytest.mark.parametrize("text", NO_NUMBER, ids=ascii)
def test_refuses_what_is_no_number(text: str) -> None:
    """What is no plain decimal number raises ValueError, nan and inf included."""
    with pytest.raises(ValueError, match=r"^"):
        parse_share(text)


NUMBERS = st.from_regex(r"\A[+-]?([0-9]{1,3}(\.[0-9]{0,15})?|\.[0-9]{1,15})([eE][+-]?[0-9]{1,2})?\Z").filter(str.isascii)


@given(NUMBERS)
def test_agrees_with_decimal(text: str) -> None:
    """For every decimal number the share is decimal.Decimal's, rounded away from zero at the ninth place."""
    exact = decimal.Decimal(text) * WHOLE
    assert parse_share(text) == int(exact.to_integral_value(decimal.ROUND_UP))


@given(st.text(alphabet="0123456789.eE+-_ %,xnaif", max_size=8))
def test_agrees_with_float_on_what_is_a_number(text: str) -> None:
    """Nothing is read that float() would refuse; what float() reads beyond it is '_' between digits, nan and inf."""
    try:
        share = parse_share(text)
    except ValueError:
        if "_" not in text and "n" not in text:
            with pytest.raises(ValueError, match="could not convert"):
                float(text)
    else:
        assert share / WHOLE == pytest.approx(float(text), abs=1e-9)


@given(st.integers(-10 * WHOLE, 10 * WHOLE))
def test_text_and_share_are_inverse(share: int) -> None:
    """A formatted share reads back as itself and has two decimals or more."""
    text = format_share(share)
    assert parse_share(text) == share
    assert len(text.partition(".")[2]) >= 2


def test_sums_are_exact() -> None:
    """0.10 + 0.70 is 0.80, which it is not as floats."""
    assert parse_share("0.10") + parse_share("0.70") == parse_share("0.80")
    assert parse_share("0.1") + parse_share("0.2") == parse_share("0.3")


FORMATTED = {"0.80": 800_000_000, "0.125": 125_000_000, "1.00": WHOLE, "-0.50": -500_000_000, "0.000000001": 1}


@pytest.mark.parametrize(("text", "share"), FORMATTED.items(), ids=FORMATTED)
def test_formats_with_two_decimals_or_more(text: str, share: int) -> None:
    """No digit is dropped, and 0.8 is written 0.80."""
    assert format_share(share) == text


ROUNDED = {
    "exact stays": (700_000_000, "0.70", "0.70"),
    "a trace more": (700_000_001, "0.71", "0.70"),
    "a trace less": (699_999_999, "0.70", "0.69"),
    "negative": (-1, "0.00", "-0.01"),
}


@pytest.mark.parametrize(("share", "brief", "floor"), ROUNDED.values(), ids=ROUNDED)
def test_rounds_claims_up_and_room_down(share: int, brief: str, floor: str) -> None:
    """In two decimals a claim is never shown smaller, and room never larger, than it is."""
    assert brief_share(share) == brief
    assert format_share(floor_share(share)) == floor


@given(st.integers(0, 2 * WHOLE), st.integers(1, 1 << 50))
def test_bytes_are_rounded_up(share: int, total: int) -> None:
    """bytes_of() gives the least whole number of bytes that is not below the share."""
    amount = bytes_of(share, total)
    assert (amount - 1) * WHOLE < share * total <= amount * WHOLE


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 50))
def test_measured_shares_are_rounded_up(amount: int, total: int) -> None:
    """share_of() gives the least share whose bytes are not below the amount."""
    assert bytes_of(share_of(amount, total), total) >= amount
    assert (share_of(amount, total) - 1) * total < amount * WHOLE
