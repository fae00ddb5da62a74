"""JupyterLab in a headless Chromium, for the tests that look at notebooks as a learner does.

Chromium is the system's; nothing is downloaded. The server gets its own empty settings, and the
notebooks a folder of their own, so that nothing of the person who runs the tests is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSERS = [found for found in map(shutil.which, NAMES) if found][:1]
"""Path of a browser; an empty list if there is none."""
TOKEN = "test"
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
FOLDERS = (
    "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR",
    "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR",
)  # fmt: skip


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def jupyterlab(folder: Path, notebooks: Path) -> Iterator[str]:
    """A running server.

    Args:
        folder: for settings and the log; must exist.
        notebooks: what the server shows.

    Yields:
        The address, without a path.
    """
    environment = dict(os.environ) | {name: str(folder / name.lower()) for name in FOLDERS}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    _write_settings(Path(environment["JUPYTERLAB_SETTINGS_DIR"]))
    port = free_port()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        f"--ServerApp.root_dir={notebooks}",
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=notebooks, env=environment, stdout=out, stderr=out)
        try:
            _wait_until_open(port, server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(timeout=30)


def _write_settings(folder: Path) -> None:
    """No pop-up with news; and cells outside of the window stay in the page, to be found."""
    settings = {
        "apputils-extension/notification": {"fetchNews": "false"},
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    for name, content in settings.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))


def _wait_until_open(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@contextmanager
def browser_page(browser: str, errors: list[str]) -> Iterator[Any]:
    """A page of a headless browser.

    Args:
        browser: path of Chromium.
        errors: gets every uncaught error of a script, and every request to another machine.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        window = play.chromium.launch(executable_path=browser, args=list(ARGUMENTS))
        page = window.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: _note_request(request.url, errors))
        yield page
        window.close()


def _note_request(url: str, errors: list[str]) -> None:
    if not url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")):
        errors.append(f"request to {url}")


def open_notebook(page: Any, address: str, name: str) -> None:
    """Show a notebook in JupyterLab, without running it."""
    page.goto(f"{address}/lab/tree/{name}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()


def run_all(page: Any) -> None:
    """Run all cells of the notebook that is shown, and wait until the kernel is idle."""
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
        ".every((prompt) => /\\[\\d+\\]/.test(prompt.textContent))"
    )
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
