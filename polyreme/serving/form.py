"""Bodies of forms with files, as browsers and OpenAI's clients send them: multipart/form-data.

Format: RFC 7578 over RFC 2046, section 5.1. A body is in memory whole by then.
"""

from __future__ import annotations

from email.message import Message
from typing import Any

from polyreme.serving.refusals import HttpRefusal

_MOST_PARTS = 64
_MOST_HEADER_BYTES = 4 << 10
_MOST_FIELD_BYTES = 64 << 10


def read_form(content_type: str, body: bytes) -> dict[str, Any]:
    """The fields of a form by name: text, or bytes of a file; a list of texts where a name ends in [].

    Raises HttpRefusal 415 for another kind of body, 400 for one that is torn, and for a field that comes twice.
    """
    head = Message()
    head["Content-Type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        message = f"Content-Type {content_type[:100]!r}: give multipart/form-data with its boundary"
        raise HttpRefusal(415, message, code="content_type")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("utf-8", "surrogateescape"))[1:]
    if not parts or not parts[-1].startswith(b"--"):
        raise _torn("its last boundary is not there")
    if len(parts) > _MOST_PARTS:
        raise _torn(f"it has over {_MOST_PARTS} parts")
    fields: dict[str, Any] = {}
    for part in parts[:-1]:
        name, value = _read_part(part)
        if name.endswith("[]"):
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise HttpRefusal(400, f"{name}: comes twice", param=name, code="invalid_value")
        else:
            fields[name] = value
    return fields


def _read_part(part: bytes) -> tuple[str, str | bytes]:
    """The name and the value of a field."""
    head, sign, value = part.partition(b"\r\n\r\n")
    start, _, lines = head.partition(b"\r\n")
    if not sign or start.strip(b" \t") or len(head) > _MOST_HEADER_BYTES:
        raise _torn("a part has no header, or one that is too long")
    headers = _headers(lines)
    name, file_name = headers.get_param("name", header="content-disposition"), headers.get_filename()
    if not isinstance(name, str) or not name:
        raise _torn("a part has no name")
    name = name[:200]
    if file_name is not None:
        return name, value
    if len(value) > _MOST_FIELD_BYTES:
        raise HttpRefusal(400, f"{name}: has {len(value)} bytes, and no filename", param=name, code="invalid_value")
    try:
        return name, value.decode()
    except UnicodeDecodeError:
        raise HttpRefusal(400, f"{name}: is no UTF-8", param=name, code="invalid_value") from None


def _headers(lines: bytes) -> Message:
    headers = Message()
    for line in lines.decode("utf-8", "replace").split("\r\n"):
        name, sign, value = line.partition(":")
        if sign and name.lower() == "content-disposition":
            headers["Content-Disposition"] = value.strip().replace("\n", " ").replace("\r", " ")
    return headers


def _torn(what: str) -> HttpRefusal:
    return HttpRefusal(400, f"the form cannot be read: {what}", code="invalid_form")
