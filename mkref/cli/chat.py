"""`mkref chat`: talk to a served model in the terminal.

    mkref serve          in one terminal
    mkref chat           in another

`/reset` forgets the conversation, `/quit` or Ctrl-D ends. Any OpenAI-compatible endpoint will do.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from mkref.cli.arguments import number, whole
from mkref.errors import MkrefError

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add `chat` to the parser."""
    parser = commands.add_parser("chat", help="talk to a served model")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000/v1", help="default: http://127.0.0.1:8000/v1"
    )
    parser.add_argument("--model", default="nano", help="what the endpoint calls it; default: nano")
    parser.add_argument("--api-key", metavar="KEY", default="")
    parser.add_argument("--system", metavar="TEXT", help="how the model is to behave")
    parser.add_argument(
        "--max-tokens", type=whole(1), default=256, metavar="N", help="default: 256"
    )
    parser.add_argument("--temperature", type=number, metavar="T", help="default: the endpoint's")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read a line, print the answer as it comes, until the input ends."""
    opening = [{"role": "system", "content": options.system}] if options.system else []
    turns: list[dict[str, str]] = [*opening]
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        said = line.strip()
        if not line or said == "/quit":
            print()
            return 0
        if said == "/reset":
            turns = [*opening]
        elif said:
            turns.append({"role": "user", "content": said})
            answer = ""
            for piece in answers(options, turns):
                print(piece, end="", flush=True)
                answer += piece
            print()
            turns.append({"role": "assistant", "content": answer})


def answers(options: argparse.Namespace, turns: list[dict[str, str]]) -> Iterator[str]:
    """Pieces of the answer to a conversation.

    Raises:
        MkrefError: nobody listens, or the endpoint refuses; says what it says.
    """
    body: dict[str, Any] = {
        "model": options.model,
        "messages": turns,
        "max_tokens": options.max_tokens,
        "stream": True,
    }
    if options.temperature is not None:
        body["temperature"] = options.temperature
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    url = f"{options.url.rstrip('/')}/chat/completions"
    if not url.startswith(("http://", "https://")):
        raise MkrefError(f"url: {options.url!r}; must begin with http:// or https://")
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            for line in reply:
                event = line.decode("utf-8").strip()
                if not event.startswith("data: ") or event == "data: [DONE]":
                    continue
                told = json.loads(event.removeprefix("data: "))
                if "error" in told:
                    raise MkrefError(f"chat: {told['error'].get('message', told['error'])}")
                for choice in told.get("choices", []):
                    delta = choice.get("delta", {})
                    yield delta.get("reasoning_content") or delta.get("content") or ""
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:200]
        raise MkrefError(f"chat: {url} answers {error.code}: {text}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise MkrefError(
            f"chat: {url} does not answer ({why}); is `mkref serve` running?"
        ) from None
