"""Tokens to text: whole characters, stop strings, the beginning of a prompt."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mkref.engine.text import Detokenizer, StopFilter
from mkref.engine.tokenizer import Tokenizer
from mkref.errors import CheckpointError, RequestError
from mkref.paths import models_root
from tests.engines import write_tokenizer

NANO = models_root() / "nano"


@pytest.fixture(name="tokenizer", scope="module")
def tokenizer_fixture() -> Tokenizer:
    """The tokenizer of nano."""
    return Tokenizer(NANO)


@pytest.fixture(name="byte_tokens")
def byte_tokens_fixture(tmp_path: Path) -> Tokenizer:
    """One token per byte."""
    return write_tokenizer(tmp_path)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Everything that a detokenizer says, the end included."""
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_pieces_are_the_text(tokenizer: Tokenizer) -> None:
    """Piece by piece gives what decoding at once gives, for code, accents, emoji and scripts."""
    text = (
        'def naïve(x):\n\treturn "日本語 🦀 é\u0301 ﷽ \U0001f468‍\U0001f469‍\U0001f467" % x  # ½\r\n'
    )
    ids = tokenizer.encode(text)
    said = pieces(tokenizer, ids)
    assert text == "".join(said)
    assert [] == [piece for piece in said if "\ufffd" in piece]


def test_no_piece_holds_half_a_character(byte_tokens: Tokenizer) -> None:
    """A character of three bytes comes out at its third token, and not before."""
    ids = byte_tokens.encode("a€é.")[1:]
    assert 7 == len(ids)
    assert ["a", "", "", "€", "", "é", ".", ""] == pieces(byte_tokens, ids)


def test_broken_bytes_show_once_it_is_certain(byte_tokens: Tokenizer) -> None:
    """Half a character, then a letter: U+FFFD comes with the letter, or else with `finish`."""
    half, letter = byte_tokens.encode("é")[1], byte_tokens.encode("a")[1]
    assert ["a", "", "\ufffda", ""] == pieces(byte_tokens, [letter, half, letter])
    assert ["a", "", "\ufffd"] == pieces(byte_tokens, [letter, half])


@pytest.mark.parametrize("seed", range(5))
def test_any_tokens_give_their_text(tokenizer: Tokenizer, seed: int) -> None:
    """Random ids, most of them nonsense as UTF-8: the pieces still add up."""
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(300)]
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids))


def test_garbage_ends_being_held(byte_tokens: Tokenizer) -> None:
    """Bytes that never become a character are shown in time, and once."""
    half = byte_tokens.encode("é")[1]
    said = pieces(byte_tokens, [half] * 200)
    assert 200 == "".join(said).count("\ufffd")
    assert next(i for i, piece in enumerate(said) if piece) <= 1


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    """Markers pass without a trace."""
    ids = tokenizer.encode("x = 1")
    assert "x = 1" == "".join(pieces(tokenizer, [1, *ids, 4, 2]))


def filtered(stops: list[str], said: list[str]) -> tuple[list[str], bool]:
    """What a filter lets pass, piece by piece and at the end."""
    stop = StopFilter(stops)
    out = [stop.push(piece) for piece in said]
    return [*out, stop.finish()], stop.stopped


def test_stop_string_across_pieces() -> None:
    """It is found wherever the pieces end; nothing of it is ever shown."""
    assert (["a", "", "", ""], True) == filtered(["\n\n"], ["a", "\n", "\nb"])
    assert (["ab", "", "", ""], True) == filtered(["STOP"], ["abS", "TO", "P and more"])


def test_a_false_alarm_is_shown_later() -> None:
    """What began like a stop string and was none comes out, in order."""
    assert (["ab", "", "STx", ""], False) == filtered(["STOP"], ["abS", "T", "x"])
    out, stopped = filtered(["aab"], ["a", "a", "a", "b", "c"])
    assert ("a", True) == ("".join(out), stopped)


def test_the_first_stop_wins() -> None:
    """Of several stop strings the one that comes first in the text ends it."""
    out, stopped = filtered(["zz", "b"], ["xab", "zz"])
    assert ("xa", True) == ("".join(out), stopped)


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_gives_the_same_text(seed: int) -> None:
    """However the text is cut into pieces, the filter shows the text before the first stop."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(60))
    stops = ["".join(rng.choice("ab") for _ in range(rng.randint(3, 7))) for _ in range(2)]
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    # A shorter stop inside a longer one ends the text first, although it begins later.
    done = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    said = []
    rest = text
    while rest:
        n = rng.randint(1, 3)
        said.append(rest[:n])
        rest = rest[n:]
    out, stopped = filtered(stops, said)
    shown = "".join(out)
    assert stopped == bool(ends)
    assert text.startswith(shown)
    if ends:
        assert len(shown) in {at for at in ends if at < min(done)}
    else:
        assert text == shown


def test_prompt_begins_with_bos() -> None:
    """The model's first token is put in front, once."""
    with_bos = Tokenizer(NANO, bos_token_id=1)
    ids = with_bos.encode("x = 1")
    assert [1, *Tokenizer(NANO).encode("x = 1")] == ids
    assert [1] == with_bos.encode("")
    assert 1 == with_bos.encode("<BOS_TOKEN>x = 1").count(1)


def test_text_that_is_none_is_refused(tokenizer: Tokenizer) -> None:
    """A lone surrogate, as Python makes from arguments that are not UTF-8."""
    with pytest.raises(RequestError, match=r"character 1 is '\\udce9'.*give UTF-8"):
        tokenizer.encode("a\udce9")


def test_tokenizer_file_errors(tmp_path: Path) -> None:
    """A missing file and a file that is no tokenizer are named."""
    with pytest.raises(CheckpointError, match="no file .*tokenizer.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read .*tokenizer.json"):
        Tokenizer(tmp_path)
