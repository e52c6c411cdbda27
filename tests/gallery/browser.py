"""A browser that goes on living while a test asks its page, unlike one that prints a page and ends."""

import base64
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds after which a wait ends a test."""
MEASURE = Path(__file__).resolve().parents[2] / "docs" / "measure_gallery.py"


def _script() -> Any:
    """The script that measures a gallery; it has the control of Chromium."""
    spec = importlib.util.spec_from_file_location("measure_gallery", MEASURE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["measure_gallery"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LivePage:
    """A page in headless Chromium, shown at a width in pixels."""

    def __init__(self, program: str, profile: Path, address: str, width: int = 1200, height: int = 1000) -> None:
        self.browser = _script().Browser(program, profile)
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.tell("Emulation.setFocusEmulationEnabled", enabled=True)
        self.open(address)

    def tell(self, method: str, **options: Any) -> dict[str, Any]:
        """The answer to a command of the DevTools protocol."""
        return self.browser.call(method, self.browser._page, **options)

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page is drawn."""
        self.tell("Page.navigate", url="about:blank")
        self.tell("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true, or the page tells of a fault."""
        end = time.monotonic() + PATIENCE
        while not self.value(condition):
            fault = self.value("document.getElementById('fault')?.textContent")
            assert not fault, fault
            assert time.monotonic() < end, condition

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is waited for."""
        answer = self.tell("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        self.browser.close()
