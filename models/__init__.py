"""Networks and everything that holds the state of a video."""

from models.registry import build_model, list_models

__all__ = ["Tracker", "build_model", "list_models"]


def __getattr__(name: str):
    # Tracker needs torch; naming a model does not.
    if name == "Tracker":
        from models.tracker import Tracker

        return Tracker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
