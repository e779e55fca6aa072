"""FlashInfer's tuner, by its names: the library chooses kernels by rules, so that there is nothing to tune."""

from __future__ import annotations

import contextlib
from typing import Any, Optional

__all__ = ["AutoTuner", "autotune", "get_autotune_process_group", "set_autotune_process_group"]

_group: Any = None


@contextlib.contextmanager
def autotune(tune_mode: bool = True, cache: Optional[str] = None, tuning_buckets=None, round_up: Optional[bool] = None,
             skip_ops=None):
    """A context in which FlashInfer would tune; all arguments are ignored."""
    yield


def set_autotune_process_group(group) -> None:
    """Remembers a process group."""
    global _group
    _group = group


def get_autotune_process_group():
    """The group that was set."""
    return _group


class AutoTuner:
    """The tuner, which never has anything to choose."""

    _instance: Optional["AutoTuner"] = None

    def __init__(self, warmup: int = 3, repeat: int = 10, stream_delay_micro_secs: int = 5000) -> None:
        self.warmup, self.repeat, self.is_tuning_mode = warmup, repeat, False

    @classmethod
    def get(cls) -> "AutoTuner":
        """The one of this process."""
        cls._instance = cls._instance or cls()
        return cls._instance

    def clear_cache(self) -> None:
        """Nothing is kept."""

    def reset_statistics(self) -> None:
        """Nothing is counted."""

    def save_configs(self, path: str) -> None:
        """Writes an empty set of choices."""
        with open(path, "w") as file:
            file.write("{}")

    def load_configs(self, path: str) -> bool:
        """Whether choices were taken from a file: never."""
        return False
