"""What goes wrong in a study."""


class StudyError(ValueError):
    """A study, its corpus or its table cannot be what it is asked to be; the message says what to change."""
