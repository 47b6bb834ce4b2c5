"""Errors that the scripts turn into an exit status and one line for the person who started them."""


class InputError(ValueError):
    """Something that a person handed in cannot be used: exit status 2, the message as one line.

    The message names the file or option, says what is wrong and what would be right.
    """
