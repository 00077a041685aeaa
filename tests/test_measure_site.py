"""The look at the site in a browser: pages that fit a phone pass, and wider ones and lost files are named."""

import pytest

from scripts import measure_site
from scripts.site_pages import browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(browser.browser_path() is None, reason="no browser is installed")]
HEAD = '<!DOCTYPE html><link rel="icon" href="data:,"><meta name="viewport" content="width=device-width">'


def test_wide_pages_and_lost_files_are_named_and_boxes_that_scroll_are_not(tmp_path, capsys):
    pages = {
        "boxed.html": '<div style="overflow-x: auto"><table style="width: 500px"><tr><td>a</table></div>',
        "lost.html": '<img src="no.png">',
        "wide.html": '<p>a<pre style="width: 500px">b</pre>',
    }
    for name, body in pages.items():
        (tmp_path / name).write_text(HEAD + body)
    assert measure_site.main(["--site", str(tmp_path), "--pictures", str(tmp_path / "looks"), "boxed.html"]) == 1
    printed = capsys.readouterr()
    lost, wide = printed.err.splitlines()
    assert lost.startswith("lost.html: 404 ")
    assert lost.endswith("/no.png")
    assert wide.startswith("wide.html: 50")  # 500 and the margin
    assert " pixels wide: <pre " in wide
    assert printed.out == "3 pages, 2 wider than a phone's 390 pixels or with requests that failed\n"
    looks = [tmp_path / "looks" / f"boxed_{screen}.webp" for screen in ("phone", "desktop")]
    assert all(path.read_bytes()[:4] == b"RIFF" for path in looks)
