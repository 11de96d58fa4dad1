"""site_check.py: looks at all pages of docs/ on the site in a browser (`make site-check`, after `make docs`).

Each page is opened at the width of a desktop and of a phone. Wrong are: a page that can be moved sideways, a missing
title, description or language, headings of the first level that aren't one, a picture that has no description or isn't
there, an error, and a request to another server.

CHROMIUM names the browser (default: chromium on the PATH).
"""

import functools
import http.server
import os
import pathlib
import shutil
import sys
import threading

from playwright.sync_api import sync_playwright

SITE = pathlib.Path(__file__).parent.parent / "build/docs"
WIDTHS = 1280, 390
# Returns what is wrong with a page, as words.
LOOK = """() => {
  const wrong = [], of = selector => [...document.querySelectorAll(selector)];
  const wide = document.documentElement.scrollWidth, width = document.documentElement.clientWidth;
  const inside = e => { for (; e; e = e.parentElement) if (getComputedStyle(e).overflowX != 'visible') return true; };
  if (wide > width) {
    const out = of('main *').filter(e => e.getBoundingClientRect().right > width + 1 && !inside(e.parentElement));
    wrong.push(`${wide} pixels wide, at most ${width}: ${out.slice(0, 3).map(e => e.outerHTML.slice(0, 80))}`);
  }
  if (!document.title.trim() || document.title.startsWith('<')) wrong.push('no title');
  if (!document.documentElement.lang) wrong.push('no language');
  if (!of('meta[name=description]').some(e => e.content)) wrong.push('no description');
  if (of('article h1').length != 1) wrong.push(`${of('article h1').length} headings of the first level`);
  for (const e of of('main img')) {
    if (!e.alt.trim()) wrong.push(`no description of ${e.src}`);
    if (!e.naturalWidth && e.getClientRects().length) wrong.push(`no picture ${e.src}`);
  }
  return wrong;
}"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def look(browser, address, page, width):
    """Returns what is wrong with a page at a width."""
    tab, wrong = browser.new_page(viewport=dict(width=width, height=900)), []
    tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    tab.on("response", lambda got: wrong.append(f"{got.status}: {got.url}") if got.status >= 400 else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda asked: wrong.append(f"asks {asked.url}") if not asked.url.startswith(address) else None)
    tab.goto(f"{address}/{page}", wait_until="networkidle")
    wrong += tab.evaluate(LOOK)
    tab.close()
    return wrong


def main():
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not browser:
        sys.exit("site_check.py: no browser: install chromium, or name one, as in CHROMIUM=/usr/bin/google-chrome")
    if not SITE.is_dir():
        sys.exit("site_check.py: no site: run `make docs` first")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    failed = False
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for page in sorted(path.relative_to(SITE) for path in [SITE / "README.html", *SITE.glob("docs/**/*.html")]):
            for width in WIDTHS:
                wrong = look(running, f"http://127.0.0.1:{server.server_port}", page, width)
                failed |= bool(wrong)
                print(f"{page}, {width} px:", "; ".join(wrong) or "nothing wrong", flush=True)
        running.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
