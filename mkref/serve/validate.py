"""From a JSON object to a checked request, or to one error that names the field.

What it does not do: check what needs the model (vocabulary, context) or the rest of the request's
texts; those errors name the field as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from mkref.engine.values import show
from mkref.serve.errors import ApiError

if TYPE_CHECKING:
    from mkref.serve.schema import Generation

__all__ = ["check_together", "refuse", "validated"]

Form = TypeVar("Form", bound="Generation")

EXPECTED = {
    "string_type": "must be a string",
    "string_unicode": "must be a string of Unicode text",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a whole number that is not so long",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "must be null; this server does not support it",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "too_long": "must have at most {max_length} elements",
    "too_short": "must have at least {min_length} element",
}
CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


def refuse(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about a field."""
    return ApiError(f"{param}: {message}", param=param, code=code)


def validated(form: type[Form], data: dict[str, Any], refused: dict[str, str]) -> Form:
    """The request that a JSON object describes.

    Args:
        form: which kind of request.
        data: the object; null is as good as absent.
        refused: fields that are refused, with the reason.

    Raises:
        ApiError: names the first wrong field.
    """
    from pydantic import ValidationError

    for name, reason in refused.items():
        if data.get(name) is not None:
            raise refuse(name, f"not supported: {reason}", "unsupported_parameter")
    known = {*form.model_fields, *refused}
    given = {name: v for name, v in data.items() if v is not None or name not in known}
    try:
        request = form.model_validate(given)
    except ValidationError as error:
        raise _api_error(error.errors(include_url=False)[0], given) from error
    check_together(request)
    return request


def check_together(request: Generation) -> None:
    """What no field shows alone.

    Raises:
        ApiError: names one of the fields.
    """
    if request.stream_options is not None and not request.stream:
        raise refuse("stream_options", "only with stream: true")
    for token in request.logit_bias or {}:
        if not (token.isascii() and token.isdecimal()) or len(token) > 10:
            raise refuse("logit_bias", f"{show(token)}; must be a token id")
    low, high = request.min_tokens, request.max_tokens
    if low is not None and high is not None and low > high:
        raise refuse("min_tokens", f"{low}; must be at most max_tokens, {high}")


def _api_error(error: Any, data: dict[str, Any]) -> ApiError:
    """One finding of Pydantic, with the path of its field."""
    kind = error["type"]
    path = _path(error["loc"], data, append=kind in CODES)
    code = CODES.get(kind, "invalid_value")
    if kind == "missing":
        return refuse(path, "missing; it is required", code)
    if kind == "extra_forbidden":
        return refuse(path, "unknown field", code)
    expected = EXPECTED.get(kind)
    if expected is None:
        words = str(error["msg"])
    elif kind == "too_short" and error["ctx"].get("min_length") == 1:
        words = "must not be empty"
    else:
        words = expected.format(**error.get("ctx", {}))
    if kind.endswith("_type") or kind in ("int_from_float", "literal_error"):
        code = "invalid_type" if kind != "literal_error" else code
    return refuse(path, f"{show(error['input'])}; {words}", code)


def _path(location: tuple[int | str, ...], data: Any, *, append: bool) -> str:
    """`messages[0].content`: what leads to a field, without the names of our own alternatives."""
    path, value = "", data
    for number, step in enumerate(location):
        last = number == len(location) - 1
        if isinstance(step, int):
            path += f"[{step}]"
            value = value[step] if isinstance(value, list) and step < len(value) else None
        elif isinstance(value, dict) and step in value:
            path += f".{step[:100]}"
            value = value[step]
        elif step == "[key]":
            break
        elif last and append and not step.startswith("~"):
            path += f".{step}"
    return path.removeprefix(".")[:300]
