"""Masks everything in a text that looks like a secret, before its owner shows it to others.

Secrets are recognised by the text before them (password=…, Authorization: …), by their own form (tokens of
known services, keys in PEM, credentials in URLs), and by this host's own: values of environment variables
with such names, and the contents of the auth files of registries.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from gpusnap.oci.base.files import open_named
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later

MASK = "***"

_NAMES = (
    r"pass(?:word|wd|phrase|code)?|pwd|secrets?|tokens?|api[-_.]?keys?|access[-_.]?keys?(?:[-_.]id)?|credentials?"
    r"|private[-_.]?keys?|auth(?:orization|[-_.]?keys?)?|cookies?|session[-_.]?(?:id|key)|bearer|signature|sas"
    r"|secret[-_.]?(?:id|keys?(?:[-_.]base)?)|(?:account|encryption|shared|signing)[-_.]?keys?"
)
# A name that is one of these, or ends with one or with a key: HF_TOKEN, "registry-password", --api-key.
_IS_NAME = compile_later(
    rf"{_NAMES}|[\w.-]*[\w.-][-_.](?:{_NAMES}|keys?)|[a-z0-9]*(?:password|passwd|token|secret)", re.I
)
_WORD = compile_later(r"[\w.-]+")
# After a name: = or :, or a space or the next word of a list after an option, and the value, quoted or not;
# an unquoted one after = or : ends at a delimiter, or at the next NAME=. JSON in JSON has \" for ".
_QUOTED = r"\\*(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|[\"'][^\n]*)"
_PLAIN = r"[^\s,;&\"'}\])]+"
_VALUE = compile_later(
    rf"(?P<between>\\*[\"']?\s*[=:]\s*)(?P<value>{_QUOTED}|{_PLAIN}(?:[ \t]+(?![\w.-]+[=:]){_PLAIN})*)"
)
_NEXT_WORD = compile_later(rf"(?P<between>\s+(?=\S)|\\*[\"']\s*,\s*)(?P<value>{_QUOTED}|{_PLAIN})")
# Options whose value is a secret for some programs (podman login -p, mysql -p, curl -u), unless the value is
# a port, a path or another option.
_SHORT = compile_later(
    r"(?:(?<=\s)|(?<=[\"'])|^)(?P<option>-p|-u|--user|--proxy-user)(?P<between>\s+|=|\\*[\"']\s*,\s*\\*[\"'])"
    r"(?P<value>[^\s\"'\\]+)",
    re.M,
)
_NO_SECRET = compile_later(r"-.*|[./~].*|[\d.:\[\]-]+(?:/(?:tcp|udp|sctp))?")
_PATTERNS = (
    # scheme://user:password@host, also a user alone, which may be a token.
    (re.compile(r"(?<=://)[^/\s'\"<>]+(?=@)"), MASK),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), MASK),
    # The whole value of headers: a scheme and its token, several cookies.
    (re.compile(r"\b((?:authorization|cookie)\s*:\s*)(?![\s\"'])[^\n\"']+", re.I), rf"\1{MASK}"),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.+/=~-]+", re.I), rf"\1 {MASK}"),
    # AWS, GitHub, GitLab, Hugging Face, OpenAI and alike, Slack, Docker, npm, Google, JSON Web Tokens.
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), MASK),
    (
        re.compile(
            r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|nvapi-|dckr_pat_|npm_|AIza)[\w-]{8,}"
        ),
        MASK,
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), MASK),
)
# A shorter one occurs in every text.
_SHORTEST = 6


def mask(text: str, known: Iterable[str] = ()) -> str:
    """Return the text without anything that looks like a secret, and without the `known` ones."""
    for secret in sorted({each for each in known if len(each) >= _SHORTEST}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return _SHORT.sub(_mask_option, "".join(_mask_values(text)))


def _mask_option(found: re.Match[str]) -> str:
    """Mask -p SECRET, -u NAME:SECRET; the name of a user or group alone is no secret."""
    value = found["value"]
    user, colon, password = value.partition(":")
    if found["option"] != "-p":
        masked = f"{user}:{MASK}" if colon and not password.isdigit() else value
    else:
        masked = value if _NO_SECRET.fullmatch(value) else MASK
    return f"{found['option']}{found['between']}{masked}"


def _mask_values(text: str) -> Iterator[str]:
    """Yield the pieces of a text, without values whose names say that they are secrets.

    Works word by word: the time is linear in the text, whatever it contains.
    """
    done = at = 0
    while (word := _WORD.search(text, at)) is not None:
        at = word.end()
        name = word[0].lstrip("-")
        if not _IS_NAME.fullmatch(name):
            continue
        found = _VALUE.match(text, at)
        if found is None and word[0].startswith("-"):  # "token expired" is prose; --token VALUE is none
            found = _NEXT_WORD.match(text, at)
        if found is None:
            continue
        value = found["value"].lstrip("\\")
        quote = value[0] if value[0] in "\"'" else ""
        yield f"{text[done:at]}{found['between']}{quote}{MASK}{quote}"
        done = at = found.end()
    yield text[done:]


def known_secrets(environ: Mapping[str, str] = os.environ, auth_files: Iterable[str] = ()) -> set[str]:
    """Return the secrets in this process's environment, and in files of logins to registries."""
    # PWD and SSH_AUTH_SOCK are paths.
    found = {each for name, each in environ.items() if _IS_NAME.fullmatch(name) and not each.startswith("/")}
    for path in auth_files:
        with suppress(OSError, ValueError, RecursionError), open_named(path) as file:
            found |= {*_texts(parse_json(file.read(1 << 20)))}
    return found


def _texts(value: object, key: str = "") -> Iterator[str]:
    """Yield all texts of an auth file except names of helpers and registries; also the decoded `auth`."""
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
