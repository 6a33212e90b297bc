"""What a text must be before it can become tokens."""

from __future__ import annotations


def check_unicode(text: str, name: str = "the text") -> None:
    """ValueError (one line) for a text with lone surrogates: half a character, which UTF-8 cannot hold.

    They come from JSON escapes that were cut in two, and from bytes that Python could not decode.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        place = error.start
        raise ValueError(
            f"{name} is not valid Unicode: character {place} is the lone surrogate U+{ord(text[place]):04X}; remove it"
        ) from None
