"""What can be enabled over what is enabled already: ``apply`` and the recorder of calls."""

import importlib
import os
import threading

_wanted = set()


def _patched(who, wanted):
    """Calls of ``flashinfer`` ask as long as somebody wants it, unless they were made to for good."""
    integration = importlib.import_module(".integration", __package__)
    if wanted and (_wanted or not integration._patched):
        names = {*_wanted, who}
        integration.install_flashinfer_integrations()
        _wanted.update(names)
    elif not wanted and who in _wanted:
        _wanted.discard(who)
        if not _wanted:
            integration.uninstall_flashinfer_integrations()


class Enabled:
    """A runtime, and a context manager that enables it. Each kind, a subclass, has a stack of those that are enabled."""

    def __init_subclass__(cls, variable):
        #: ``variable=1`` in the environment enables one when first asked.
        cls._variable, cls._stack, cls._lock, cls._asked = variable, [], threading.RLock(), False

    @classmethod
    def top(cls):
        """The one enabled last, or none."""
        if not cls._asked:
            with cls._lock:
                if not cls._asked:
                    cls._asked = True
                    if os.environ.get(cls._variable) == "1":
                        cls().start()
        return cls._stack[-1] if cls._stack else None

    @classmethod
    def pop(cls):
        """Disables the one enabled last."""
        with cls._lock:
            if cls.top() is not None:
                cls._stack.pop()
            _patched(cls.__name__, bool(cls._stack))

    def start(self):
        """Enables it, over what is enabled already; calls of ``flashinfer`` ask as long as something is enabled."""
        with self._lock:
            if not self._stack or self._stack[-1] is not self:
                self._stack.append(self)
            _patched(type(self).__name__, True)
        return self

    def stop(self):
        """Disables it; those enabled later must be disabled first."""
        with self._lock:
            if self in self._stack and self._stack[-1] is not self:
                raise RuntimeError("another runtime was enabled later and is still enabled")
            if self in self._stack:
                self._stack.pop()
            _patched(type(self).__name__, bool(self._stack))

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()
