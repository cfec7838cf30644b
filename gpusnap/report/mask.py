"""Mask what looks like a secret in a text that its owner is going to show to others.

By what stands before it (password=…, Authorization: …), by its own form (tokens of known services, keys in
PEM, credentials in URLs), and by what is known on this host: values of the environment with such names, and
what is in the auth files of registries.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from gpusnap.oci.base.json_text import parse_json

MASK = "***"

_NAMES = (
    r"pass(?:word|wd|phrase|code)?|pwd|secrets?|tokens?|api[-_.]?keys?|access[-_.]?keys?(?:[-_.]id)?|credentials?"
    r"|private[-_.]?keys?|auth(?:orization|[-_.]?keys?)?|cookies?|session[-_.]?(?:id|key)|bearer|signature|sas"
)
# A name that is one of these, or ends with one: HF_TOKEN, "registry-password", --api-key.
_NAME = rf"(?:[\w.-]*[\w.-][-_.])?(?:{_NAMES})|[a-z0-9]*(?:password|passwd|token|secret)"
_IS_NAME = re.compile(_NAME, re.I)
_PATTERNS = (
    # scheme://user:password@host, also a user alone, which may be a token.
    (re.compile(r"(?<=://)[^/\s@'\"<>]+(?=@)"), MASK),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), MASK),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.+/=~-]+", re.I), rf"\1 {MASK}"),
    # A name, = or : or a blank after an option, and the value, quoted or not.
    (
        re.compile(
            rf"(?<![\w.])(?P<name>-{{0,2}}(?:{_NAME}))(?P<between>[\"']?\s*[=:]\s*|(?<=\w)\s+(?=\S))"
            r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,;&\"'}\])]+)",
            re.I,
        ),
        None,
    ),
    # AWS, GitHub, GitLab, Hugging Face, OpenAI and alike, Slack, JSON Web Tokens.
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), MASK),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|nvapi-)[\w-]{8,}"), MASK),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), MASK),
)
# A shorter one is in every text.
_SHORTEST = 6


def mask(text: str, known: Iterable[str] = ()) -> str:
    """The text without what looks like a secret, and without the `known` ones."""
    for secret in sorted({each for each in known if len(each) >= _SHORTEST}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(_value_masked if instead is None else instead, text)
    return text


def _value_masked(found: re.Match[str]) -> str:
    blank = not found["between"].strip(" \t\"'")
    if blank and not found["name"].startswith("-"):
        return found[0]  # "token expired" is prose; --token VALUE is none
    quote = found["value"][0] if found["value"][0] in "\"'" else ""
    return f"{found['name']}{found['between']}{quote}{MASK}{quote}"


def known_secrets(environ: Mapping[str, str] = os.environ, auth_files: Iterable[str] = ()) -> set[str]:
    """The secrets of this process' environment, and of files of logins at registries."""
    # PWD and SSH_AUTH_SOCK are paths.
    found = {each for name, each in environ.items() if _IS_NAME.fullmatch(name) and not each.startswith("/")}
    for path in auth_files:
        with suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
            found |= {*_texts(parse_json(file.read(1 << 20)))}
    return found


def _texts(value: object, key: str = "") -> Iterator[str]:
    """All texts of an auth file but names of helpers and registries; of `auth` what it stands for as well."""
    match value:
        case dict():
            for name, each in value.items():
                if name not in ("credHelpers", "credsStore", "HttpHeaders", "proxies"):
                    yield from _texts(each, name)
        case str():
            yield value
            if key == "auth":
                with suppress(binascii.Error, UnicodeDecodeError):
                    yield base64.b64decode(value, validate=True).decode().partition(":")[2]
