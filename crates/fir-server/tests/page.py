"""The chat page in headless Chromium, with a server at $FIR_URL: it streams, stops, counts, and fits a phone.

Pictures go to the folder $FIR_SHOTS, if that is set.
"""

import os
import pathlib
import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

URL = os.environ.get("FIR_URL", "http://127.0.0.1:8000")
SHOTS = os.environ.get("FIR_SHOTS")


@pytest.fixture(scope="module")
def browser():
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light-desk", "dark-phone"])
def page(browser, request):
    scheme, device = request.param.split("-")
    size = {"desk": {"width": 1100, "height": 750}, "phone": {"width": 390, "height": 780}}[device]
    context = browser.new_context(color_scheme=scheme, viewport=size, has_touch=device == "phone")
    page = context.new_page()
    page.problems = []
    page.on("console", lambda m: m.type == "error" and page.problems.append(m.text))
    page.on("pageerror", lambda e: page.problems.append(str(e)))
    page.on("request", lambda r: r.url.startswith((URL, "data:")) or page.problems.append(r.url))
    page.goto(URL)
    page.name = request.param
    yield page
    assert page.problems == []
    context.close()


def shot(page, name):
    if SHOTS:
        pathlib.Path(SHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{SHOTS}/{page.name}-{name}.png")


def ask(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_it_streams_and_counts(page):
    expect(page.locator("#model")).to_contain_text("tokens of context")
    shot(page, "empty")
    ask(page, "Hello there, who are you?")
    expect(page.locator(".user")).to_have_text("Hello there, who are you?")
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    facts = page.locator(".facts")
    expect(facts).to_contain_text("tokens/s")
    expect(facts).to_contain_text("prompt tokens from the prefix cache")
    assert page.locator(".body").inner_text().strip()
    ask(page, "And once more?")
    expect(page.locator(".facts")).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    assert [m["role"] for m in page.evaluate("messages")] == ["user", "assistant"] * 2
    shot(page, "chat")
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, "nothing may stick out sideways"
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_it_stops(page):
    ask(page, "Tell me a very long story about a forest.")
    expect(page.locator(".body")).not_to_be_empty(timeout=60_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".facts")).to_contain_text("stopped")
    said = page.locator(".body").inner_text()
    page.wait_for_timeout(300)
    assert page.locator(".body").inner_text() == said
    shot(page, "stopped")


def test_markup_is_shown_and_not_run(page):
    page.evaluate("show(document.querySelector('#empty'), 'a **very** <img src=x onerror=alert(1)>\\n```js\\nlet x;\\n```\\n`b`')")
    expect(page.locator("#empty img")).to_have_count(0)
    expect(page.locator("#empty pre")).to_have_text("let x;")
    expect(page.locator("#empty b")).to_have_text("very")
    expect(page.locator("#empty code")).to_have_text("b")


def test_it_begins_with_a_suggestion(page):
    page.get_by_role("button", name="Why is the sky blue?").click()
    expect(page.locator(".user")).to_have_text("Why is the sky blue?")
    expect(page.locator(".body")).not_to_be_empty(timeout=60_000)
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Why is the sky blue?")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    assert page.evaluate("messages") == [], "what was cut off is no part of the new chat"
