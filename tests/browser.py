"""Headless Chromium for tests of pages; the tests are skipped where it cannot be had."""

import contextlib
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def chromium():
    """A running browser of this machine, driven by Playwright, which downloads none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install playwright"
    )
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs a browser in PATH: {', '.join(NAMES)}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=found, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser, path, *, width=1280, height=900, fragment="", dark=False):
    """A page of a file, which must neither complain nor ask for anything but that file."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.set_default_timeout(10_000)
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url.split("#")[0]))
    address = path.as_uri()
    page.goto(address + fragment)
    try:
        yield page
        assert not complaints, complaints
        assert set(requests) == {address}, requests
    finally:
        context.close()
