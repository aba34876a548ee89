"""`ETag` and `If-Match`: no change overwrites one that its author has not seen."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any

from fastapi import Header

from gxpo_services.api.errors import PreconditionFailed

IfMatch = Annotated[
    str | None,
    Header(
        max_length=1000,
        description="ETag of the version that the change is meant for, or *; another present version: 412.",
    ),
]
ETAG_HEADER = {"ETag": {"description": "Version of what can be edited; for If-Match.", "schema": {"type": "string"}}}
_TAG = re.compile(r'(?:W/)?"[^"]*"')


def etag(content: Any) -> str:
    """The entity tag of what people edit, from its JSON. Progress is no part of it, or no edit of a running run
    could succeed."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return f'"{hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]}"'


def check_match(if_match: str | None, present: str, what: str) -> None:
    """Raise PreconditionFailed unless `If-Match` is missing, * or names the present version. Weak tags never match."""
    if if_match is None or if_match.strip() == "*" or present in _TAG.findall(if_match):
        return
    raise PreconditionFailed(f"{what} was changed since that version; read it again, then repeat the change")
