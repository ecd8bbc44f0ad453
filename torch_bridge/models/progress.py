"""How fetching and loading tell a listener what they do. Needs no torch."""

from typing import Protocol


class StageObserver(Protocol):
    """Hears which stage of some work runs and how far it is, from one thread, in order."""

    def on_stage(self, name: str, total: int | None) -> None:
        """A stage begins and any earlier one has ended.

        Args:
            name: What is done now, for people, such as "prefill".
            total: Steps the stage will take, such as tokens; None when not known.
        """
        ...

    def on_progress(self, done: int) -> None:
        """`done` steps of the current stage are complete, counted from its start."""
        ...


class SilentObserver:
    """A `StageObserver` that shows nothing."""

    def on_stage(self, name: str, total: int | None) -> None:
        """Ignore the stage."""

    def on_progress(self, done: int) -> None:
        """Ignore the progress."""
