"""The one error type of what a user got wrong: names the setting and the remedy."""


class SettingError(ValueError):
    """A flag, environment variable or installation that cannot work as it is. The message says what to change."""
