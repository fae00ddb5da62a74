"""A chat with any OpenAI-compatible endpoint, with what Python brings along.

What it does not do: more than `mkref chat` needs. Programs are better off with `openai`.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from mkref.errors import MkrefError

__all__ = ["answers", "is_url"]


def is_url(base: str) -> bool:
    """Can it be the address of an endpoint?"""
    try:
        parts = urlsplit(base)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def answers(base: str, api_key: str, **fields: Any) -> Iterator[str]:
    """Pieces of the answer to a conversation, as they come.

    Args:
        base: address of the endpoint, up to and with /v1.
        api_key: sent as a bearer token; "" for none.
        fields: of the request; None is left out.

    Raises:
        MkrefError: nobody listens, or the endpoint refuses; says what it says.
    """
    body = {"stream": True, **{k: v for k, v in fields.items() if v is not None}}
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    url = f"{base.rstrip('/')}/chat/completions"
    if not is_url(base):
        raise MkrefError(f"url: {base!r}; must be like http://127.0.0.1:8000/v1")
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            for line in reply:
                event = line.decode("utf-8").strip()
                if event == "data: [DONE]":
                    return
                if not event.startswith("data: "):
                    continue
                told = json.loads(event.removeprefix("data: "))
                if "error" in told:
                    raise MkrefError(f"chat: {told['error'].get('message', told['error'])}")
                for choice in told.get("choices", []):
                    delta = choice.get("delta", {})
                    yield delta.get("reasoning_content") or delta.get("content") or ""
        raise MkrefError(f"chat: {url} broke off before the answer was complete")
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:200]
        raise MkrefError(f"chat: {url} answers {error.code}: {text}") from None
    except http.client.HTTPException as error:
        raise MkrefError(f"chat: {url} broke off: {type(error).__name__}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise MkrefError(
            f"chat: {url} does not answer ({why}); is `mkref serve` running?"
        ) from None
