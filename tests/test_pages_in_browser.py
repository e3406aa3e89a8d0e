"""The report and the annotation page in a real browser, Debian's Chromium, opened from disk.

Skipped where playwright or Chromium is absent (``pip install playwright``; ``apt-get install
chromium``). The check by axe-core needs its file (``npm pack axe-core``), named in ``$AXE_CORE``.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from judging import plant
from test_report import HOSTILE, hostile, no_tokenizer, unpacked

from ia_mech.judge.__main__ import main as judge_main
from ia_mech.judge.rubric import GENUINE, NAMES
from ia_mech.judge.sheets import export_sheet, import_sheet, write_sheet
from ia_mech.page import packed, rendered
from ia_mech.report.__main__ import render_report
from ia_mech.report.turns import _columns
from ia_mech.run import Run
from ia_mech.run.labels import KEY

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
CATEGORIES = [[GENUINE, "generic", "degenerate", "new_topic"][i * 7 % 4] for i in range(60)]
__all__ = ["no_tokenizer"]  # a fixture that acts here, too


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser, tmp_path) -> Iterator[Callable]:
    """Opens a page from disk, and fails at the end if it logged anything or made a request."""
    wrong: list[str] = []
    contexts = []

    def open_page(content: str | Path, place: str = "", **options):
        file = content if isinstance(content, Path) else tmp_path / "page.html"
        if isinstance(content, str):
            file.write_text(content, encoding="utf-8")
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: dialog.accept())
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("data:", "blob:", f"file://{file}"))
                else wrong.append(request.url)
            ),
        )
        page.goto(f"file://{file}{place}")
        page.wait_for_selector("#data", state="detached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def judged(run):
    plant(run, "rules", [CATEGORIES])
    return run


def option(page, label: str, text: str) -> None:
    page.get_by_role("combobox", name=label, exact=True).select_option(text)


def counted(page) -> int:
    return int(page.locator("#count").text_content().split()[0])


def axe(page) -> list[str]:
    """Serious findings of axe-core."""
    file = os.environ.get("AXE_CORE", "")
    if not file:
        pytest.skip("$AXE_CORE doesn't name axe.min.js")
    page.evaluate(Path(file).read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    return [one["id"] for one in found if one["impact"] in ("serious", "critical")]


def test_filters_list_and_permalinks(judged, opened):
    content = render_report([judged])
    turns = unpacked(content)["turns"]
    page = opened(content)
    assert counted(page) == 60
    option(page, "temperature", "T = 0.7")
    assert counted(page) == 24
    option(page, "category", GENUINE)
    expected = [
        i
        for i, name in enumerate(judged.labels.judgements("rules")["category"])
        if name == GENUINE and turns["temperature"][i] == 0.7
    ]
    assert counted(page) == len(expected) > 0
    assert page.locator(".row").first.get_attribute("id") == f"turn-{expected[0]}"
    shown = page.locator(".card.chosen .text")  # the first that passes
    assert shown.text_content() == (turns["text"][expected[0]] or "(empty)")
    page.get_by_role("button", name="clear").click()
    playwright.expect(page.locator("#count")).to_have_text("60 of 60 turns")
    page.get_by_label("text (turn, query, response)").fill("no turn says this")
    assert counted(page) == 0
    page.get_by_role("button", name="clear").click()
    playwright.expect(page.locator("#count")).to_have_text("60 of 60 turns")
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    last = unpacked(content)["contexts"]["id"][turns["context"][59]]
    assert page.locator("#context h3").text_content() == last
    assert page.locator("#turn-59").get_attribute("aria-selected") == "true"
    assert page.locator(".card").count() == 5
    link = page.evaluate("location.hash")
    again = opened(content, link)
    assert again.locator("#context h3").text_content() == last
    assert again.locator(".card.chosen .text").text_content() == (turns["text"][59] or "(empty)")
    assert "no such context" in opened(content, "#context=none").locator("#context").text_content()


def test_decoys_are_shown_when_they_are_chosen(run, opened):
    assert judge_main(["run", str(run.path)]) == 0
    decoys = Run.open(run.path).labels.decoys("rules")
    page = opened(render_report([Run.open(run.path)]))
    assert page.locator("#count").text_content() == f"60 of 60 turns and {len(decoys)} decoys"
    option(page, "shown after", "another conversation (decoy)")
    assert counted(page) == (decoys["decoy"] == "conversation").sum() > 0
    assert "shown after another conversation (decoy)" in page.locator(".row").first.text_content()
    assert page.locator("#context h4").last.text_content().startswith("Decoys: ")
    assert page.locator("#context .cards").last.locator(".card.chosen").count() == 1
    page.get_by_role("button", name="clear").click()
    playwright.expect(page.locator("#count")).to_contain_text("60 of 60 turns")


def test_tokens_are_shaded_and_add_up(opened):
    contexts, turns = many(2, 1)
    turns["pieces"] = [[2, 3], None]
    turns["text"] = ["😀 on", "whole"]
    turns["reaction_bits"], turns["bits_by_token"] = [1.5, -1.0], [[2.0, -0.5], [1.0]]
    page = opened(rendered_turns(contexts, turns))
    tokens = page.locator(".card .text span")
    assert tokens.all_text_contents() == ["😀", " on"]
    assert tokens.first.get_attribute("title") == "2.00"
    colours = [tokens.nth(k).evaluate("e => getComputedStyle(e).backgroundColor") for k in (0, 1)]
    assert len(set(colours)) == 2 and "rgba(0, 0, 0, 0)" not in colours
    page.get_by_label("bits from").fill("0")
    assert counted(page) == 1


def test_hostile_texts_do_nothing(run, opened):
    bad = hostile(run)
    plant(bad, "rules", [CATEGORIES], rationale=[HOSTILE[i % len(HOSTILE)] for i in range(60)])
    page = opened(render_report([bad]))
    for at in range(len(HOSTILE)):
        page.locator(".row").nth(min(at, page.locator(".row").count() - 1)).click()
        page.locator("#list").evaluate("(e, at) => { e.scrollTop = 52 * 5 * at; }", at)
        page.wait_for_timeout(20)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#turns ~ * img, #turns ~ * svg, #turns ~ * a").count() == 0
    sheet = export_sheet(bad, 20)
    *_, file = write_sheet(bad, sheet, bad.path.parent / "blind")
    blind = opened(file)
    for _ in range(5):
        blind.keyboard.press("1")
    assert blind.evaluate("window.hacked") is None


def test_annotations_make_the_round_trip(judged, opened, tmp_path):
    sheet = export_sheet(judged, 12)
    *_, file = write_sheet(judged, sheet, tmp_path / "blind")
    page = opened(file)
    items = [row["item"] for row in sheet.rows]
    state = page.locator("#state")
    assert state.text_content() == f"0 of {len(items)} done"
    page.keyboard.press("1")
    page.keyboard.press("8")
    page.keyboard.press("u")
    page.keyboard.press("d")  # the second is put off
    page.keyboard.press("n")
    page.keyboard.type("u see 3")  # no key acts in a note
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    assert state.text_content() == f"2 of {len(items)} done, 1 deferred"
    page.reload()
    page.wait_for_selector("#data", state="detached")
    assert state.text_content() == f"2 of {len(items)} done, 1 deferred"
    for _ in items[3:]:
        page.get_by_role("button", name="3 assistant restatement").click()
    shown = page.locator("#turn .text").last.text_content()
    assert shown == (sheet.rows[1]["user_turn"] or "(empty)")  # the deferred one comes last
    page.keyboard.press("7")
    assert "All turns are annotated" in page.locator("#turn").text_content()
    with page.expect_download() as download:
        page.keyboard.press("e")
    saved = tmp_path / download.value.suggested_filename
    assert saved.name == f"{sheet.key['sheet']}.json"
    download.value.save_as(saved)
    import_sheet(judged, saved, "anna")
    own, decoys = judged.labels.annotations("anna"), judged.labels.decoys("anna", "annotations")
    both = pd.concat([own.assign(decoy=None, shown=None), decoys])
    said = {
        (*row[:3], row.decoy, row.shown): (row.category, row.note)
        for row in both[[*KEY, "decoy", "shown", "category", "note"]].itertuples(index=False)
    }
    expected = [NAMES[0], NAMES[6], NAMES[8]] + [NAMES[2]] * (len(items) - 3)
    for n, (item, category) in enumerate(zip(items, expected, strict=True)):
        place = sheet.key["items"][item]
        key = (*(place[name] for name in KEY), place.get("decoy"), place.get("shown"))
        assert said[key] == (category, "u see 3" if n == 2 else "")
    page.get_by_role("button", name="start over").click()
    assert state.text_content() == f"0 of {len(items)} done"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(judged, opened, tmp_path, scheme):
    *_, file = write_sheet(judged, export_sheet(judged, 12), tmp_path / "blind")
    assert axe(opened(file, color_scheme=scheme)) == []
    page = opened(render_report([judged]), color_scheme=scheme)
    page.locator(".row").nth(1).click()
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert axe(page) == []


def many(contexts: int, turns: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Frames of a turn browser: so many contexts, with so many turns each."""
    ids = [f"c{n}" for n in range(contexts)]
    about = pd.DataFrame({"context_id": ids, "run": 0, "dataset": "d", "response_index": None})
    about["query"] = [f"What is {n}?" for n in range(contexts)]
    about["response"] = [f"{n} is a number. " * 20 for n in range(contexts)]
    about["response_cut_off"] = False
    count = contexts * turns
    rng = np.random.default_rng(0)
    words = np.array(["a", "lens", "gathers", "the", "lamp", "light", "into", "one", "beam"])
    said = pd.DataFrame({"context_id": np.repeat(ids, turns), "run": 0, "temperature": 1.0})
    said["text"] = [" ".join(row) for row in words[rng.integers(0, len(words), (count, 30))]]
    said["logprobs_raw"] = list(-rng.random((count, 30)).astype(np.float32))
    said["logprob_raw"] = -15.0
    said["pieces"] = None
    said["category rules"] = np.array(NAMES)[rng.integers(0, len(NAMES), count)]
    said["reason rules"], said["grounded rules"], said["decoy"] = "because", np.nan, ""
    return about, said


def rendered_turns(contexts: pd.DataFrame, turns: pd.DataFrame) -> str:
    content = {"title": "t", "asked": "a", "groups": [], "several": False, "held": "h", "bare": []}
    content["rubric"] = ()
    data = packed(_columns(contexts, turns, ["run"]))
    return rendered("report", data, **content, provenance=[], written="w")


@pytest.mark.parametrize(
    ("contexts", "paint", "filtering"), [(1250, 2.0, 0.2), (12_500, 20.0, 2.0)]
)
def test_pages_of_many_turns(opened, contexts, paint, filtering):
    """10,000 turns: painted within 2 s and filtered within 0.2 s; 100,000 open."""
    content = rendered_turns(*many(contexts, 8))
    page = opened(content)
    drawn = page.evaluate("performance.now()")  # turns are there: not before they were painted
    assert counted(page) == 8 * contexts
    first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert first < drawn < 1000 * paint
    taken = page.evaluate(
        """() => {
          const input = document.querySelector("input[type=search]");
          input.value = "lamp light";
          const change = () => input.dispatchEvent(new Event("input", { bubbles: true }));
          const times = [];
          for (let k = 0; k < 3; k++) {
            const from = performance.now();
            change();
            document.getElementById("list").getBoundingClientRect();
            times.push(performance.now() - from);
          }
          return times;
        }"""
    )
    print(
        f"{8 * contexts} turns: {len(content) / 1e6:.1f} MB, first paint {first:.0f} ms, "
        f"turns {drawn:.0f} ms, filter {min(taken):.0f} to {max(taken):.0f} ms"
    )
    assert 0 < counted(page) < 8 * contexts
    assert min(taken) < 1000 * filtering
    began = time.monotonic()
    page.locator("#list").evaluate("(e) => { e.scrollTop = e.scrollHeight; }")
    page.wait_for_selector(".row")
    assert time.monotonic() - began < 5 and page.locator(".row").count() < 40
