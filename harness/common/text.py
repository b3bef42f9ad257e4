"""Text of others, as a terminal, a page or an agent may be shown it. The standard library suffices."""

import re

# Control characters (C0 but tab and line break, DEL, C1), line separators, marks that turn the direction of text, halves of characters.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def visible(text):
    """The text with what a terminal would obey, or nobody would see, written out: \\x1b for the escape character."""
    return HIDDEN.sub(lambda match: ascii(match[0])[1:-1], text)
