"""The two fields of a form that the front has to know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.web.forms import fields

TYPE = "multipart/form-data; boundary=xyz"


def form(*parts: tuple[str, bytes], mark: bytes = b"xyz") -> bytes:
    body = b"".join(
        b"--%s\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (mark, head.encode(), data) for head, data in parts
    )
    return body + b"--" + mark + b"--\r\n"


def test_model_and_stream() -> None:
    """In any order, beside a file that looks like a form itself."""
    inner = form(('name="model"', b"other"), mark=b"abc")
    body = form(('name="file"; filename="a.wav"', b"\0\r\n" + inner), ("name=stream", b"true"), ('name="model"', "ü/x".encode()))
    assert fields(TYPE, body) == {"stream": "true", "model": "ü/x"}
    assert fields('multipart/form-data; charset=utf-8; boundary="xyz"', body) == {"stream": "true", "model": "ü/x"}


def test_a_files_name_is_no_fields() -> None:
    """filename="..." ends in name="..." as well."""
    assert fields(TYPE, form(('filename="model"; name="file"', b"x"))) == {}


@pytest.mark.parametrize(
    ("kind", "body"), [("multipart/form-data", form()), (TYPE, b""), (TYPE, form(('name="model"', b"a"))[:-6])]
)
def test_what_is_no_form(kind: str, body: bytes) -> None:
    """Without a boundary, without anything, or cut short."""
    assert fields(kind, body) is None


def test_a_long_model_is_no_model() -> None:
    """A name of more than 4096 bytes is not looked at."""
    assert fields(TYPE, form(('name="model"', b"x" * 5000))) == {}


@given(st.binary(max_size=200))
def test_anything_is_read_to_an_end(data: bytes) -> None:
    """Whatever stands between two marks."""
    read = fields(TYPE, b"--xyz" + data + b"\r\n--xyz--\r\n")
    assert read is None or set(read) <= {"model", "stream"}
