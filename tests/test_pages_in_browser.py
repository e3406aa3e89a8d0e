"""The report and the annotation page in a real browser, Debian's Chromium, opened from disk.

Skipped where playwright or Chromium is absent (``pip install playwright``; ``apt-get install
chromium``). The check by axe-core needs its file (``npm pack axe-core``), named in ``$AXE_CORE``.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import pandas as pd
import pytest
from judging import plant
from runs import sampled
from test_perturbations import folder, plain
from test_report import CATEGORIES, HOSTILE, hostile, judged, no_tokenizer, unpacked

from ia_mech.judge.__main__ import main as judge_main
from ia_mech.judge.rubric import FOLLOW_UP, NAMES, heading
from ia_mech.judge.sheets import export_sheet, import_sheet, write_sheet
from ia_mech.page import glossary, packed, rendered
from ia_mech.rates.__main__ import main as rates_main
from ia_mech.report.__main__ import render_report
from ia_mech.report.turns import columns_of
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.settings import Settings

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
__all__ = ["folder", "judged", "no_tokenizer", "plain"]  # fixtures of other tests


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
        page.evaluate("document.querySelector('#filters details')?.setAttribute('open', '')")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def option(page, label: str, text: str) -> None:
    page.get_by_role("combobox", name=label, exact=True).select_option(text)


def counted(page) -> tuple[int, int]:
    """How many contexts and turns pass the filters."""
    words = page.locator("#count").text_content().replace(",", "").split()
    return int(words[words.index("conversations") - 1]), int(words[words.index("turns") - 1])


def axe(page) -> list[str]:
    """Serious findings of axe-core."""
    file = os.environ.get("AXE_CORE", "")
    if not file:
        pytest.skip("$AXE_CORE doesn't name axe.min.js")
    page.evaluate(Path(file).read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    return [one["id"] for one in found if one["impact"] in ("serious", "critical")]


def test_filters_pages_and_permalinks(judged, opened):
    content = render_report([judged])
    data = unpacked(content)
    turns, ids = data["turns"], data["contexts"]["id"]
    page = opened(content)
    assert counted(page) == (12, 60) and page.locator(".context").count() == 10
    follow_ups = judged.labels.judgements("builtin")["category"] == FOLLOW_UP
    assert page.locator(".turn .follow-up").count() == follow_ups[:50].sum() > 0
    option(page, "temperature", "T = 0.7")
    assert counted(page) == (12, 24)
    option(page, "category", "follow-up")
    passing = [i for i in np.flatnonzero(follow_ups) if turns["temperature"][i] == 0.7]
    first = turns["context"][passing[0]]
    assert counted(page) == (len({turns["context"][i] for i in passing}), len(passing))
    row = page.locator(".context").first
    assert row.get_attribute("aria-label") == ids[first]
    shown = [turns["text"][i] or "(empty)" for i in passing if turns["context"][i] == first]
    assert row.locator(".turn .text").all_text_contents() == shown
    row.get_by_text(f"{5 - len(shown)} other turns").click()
    playwright.expect(row.locator(".turn")).to_have_count(5)
    row.locator(".why").first.click()
    assert row.locator(".turn details[open]").count() == 1
    page.get_by_role("button", name="clear").click()
    assert counted(page) == (12, 60)
    page.get_by_label("text of turn or conversation").fill("no turn says this")
    assert counted(page) == (0, 0) and "No turn passes" in page.locator("#rows").text_content()
    page.get_by_role("button", name="clear").click()
    page.get_by_role("button", name="further").click()
    assert page.locator(".context h3").all_text_contents() == ids[10:]
    page.get_by_role("link", name=ids[11], exact=True).click()
    again = opened(content, page.evaluate("location.hash"))
    assert again.evaluate("document.activeElement.getAttribute('aria-label')") == ids[11]
    assert "no such context" in opened(content, "#context=none").locator("#count").text_content()


def choice(page, name: str) -> str:
    """What a control of the filters says."""
    return page.locator(f'#filters [name="{name}"]').input_value()


def test_the_address_holds_what_is_chosen(judged, opened):
    content = render_report([judged])
    page = opened(content)
    option(page, "category", "follow-up")
    option(page, "sort conversations by", "random")
    page.get_by_label("20 at random: seed").fill("2")
    place, found = page.evaluate("location.hash"), counted(page)
    shown = page.locator(".context").all_text_contents()
    again = opened(content, place)
    assert (
        choice(again, "category") == "follow-up"
        and choice(again, "sort conversations by") == "random"
    )
    assert counted(again) == found and again.locator(".context").all_text_contents() == shown
    assert opened(content, "#length=3&elements=4").locator("#count").text_content()  # no controls
    page.get_by_role("button", name="clear").click()
    assert page.evaluate("location.hash") == "" and counted(page) == (12, 60)


def test_a_claim_and_a_row_of_a_table_lead_to_their_turns(judged, opened):
    assert rates_main([str(judged.path)]) == 0
    page = opened(render_report([judged]))
    labels = judged.labels.judgements("builtin")
    page.get_by_role("link", name="the turns that the judge calls follow-ups").click()
    assert choice(page, "category") == "follow-up"
    assert counted(page)[1] == (labels["category"] == FOLLOW_UP).sum()
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    rows = page.locator("td a[href*='dataset=builtin-maths&temperature=T+']")
    if rows.count() == 0:
        rows = page.locator("td a[href*='temperature=T+'][href*='dataset=builtin-maths']")
    rows.first.click()
    assert choice(page, "category") == ""  # filters of before are gone
    assert choice(page, "dataset") == "builtin-maths"
    temperature = float(choice(page, "temperature").removeprefix("T = "))
    run = judged.generations
    wanted = (run["dataset"] == "builtin-maths") & (run["temperature"] == temperature)
    assert counted(page)[1] == wanted.sum() > 0


def test_a_mark_of_a_figure_leads_to_its_turns_and_words_say_what_they_mean(
    judged, opened, pictures
):
    assert rates_main([str(judged.path)]) == 0
    page = opened(render_report([judged]))
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    bar = page.locator(".plot a[href*='category=new']").first
    bar.focus()
    page.keyboard.press("Enter")
    place, title = dict(parse_qsl(bar.get_attribute("href")[1:])), bar.locator("title").inner_html()
    assert choice(page, "category") == place["category"] == "new topic"
    assert choice(page, "temperature") == place["temperature"]
    at = 0.0 if place["temperature"] == "greedy" else float(place["temperature"][4:])
    labels = judged.labels.judgements("builtin")
    wanted = (labels["category"] == "new_topic") & (labels["temperature"] == at)
    assert counted(page)[1] == wanted.sum() > 0
    assert f"{wanted.sum()} of {(labels['temperature'] == at).sum()} assessed turns" in title
    page.go_back()
    page.wait_for_function("location.hash === ''")
    assert choice(page, "category") == "" and counted(page)[1] == len(judged.generations)
    meanings = dict(glossary())
    listed = page.locator("#words dt").all_text_contents()
    assert "judge" in listed and set(listed) < set(meanings)  # the words of this page alone
    word = page.locator(".answer .term").first
    assert word.get_attribute("title") in meanings.values()
    word.focus()
    page.keyboard.press("Enter")
    assert page.locator(f"{word.get_attribute('href')}").is_visible()


def test_a_row_of_a_changed_condition_leads_to_its_turns(plain, folder, opened):
    turns = pd.read_parquet(folder / "turns.parquet")
    page = opened(render_report([plain], [folder]))
    assert choice(page, "condition") == "unchanged"
    assert counted(page)[1] == len(plain.generations)
    name = "no response (remove)"
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.locator("td a[href*='condition=unchanged']").count() > 0
    row = page.locator("td a[href*='condition=no+response']").first
    place = dict(parse_qsl(row.get_attribute("href")[1:]))
    row.click()
    at = 0.0 if place["temperature"] == "greedy" else float(place["temperature"][4:])
    wanted = turns[(turns["condition"] == "remove") & (turns["temperature"] == at)]
    assert choice(page, "condition") == name and counted(page)[1] == len(wanted) > 0
    option(page, "follow-up to the unchanged response", "no")
    assert counted(page)[1] == (wanted["follow_up_to_original"] == 0).sum()
    context = wanted["context_id"].iloc[0]
    page.evaluate("(id) => { location.hash = new URLSearchParams({context: id}); }", context)
    page.wait_for_function("document.activeElement.className === 'context'")
    assert page.evaluate("document.activeElement.ariaLabel") == context


def test_a_point_of_a_field_s_value_leads_to_its_turns(judged, opened, monkeypatch, pictures):
    topics = ["maths", "art"] * (len(judged.contexts) // 2)
    metadata = pd.DataFrame({"topic": topics}, pd.Index(judged.contexts["context_id"]))
    monkeypatch.setattr(Run, "metadata", metadata)
    assert rates_main([str(judged.path), "--by", "topic"]) == 0
    page = opened(render_report([judged]))
    mark = page.locator(".plot a[href*='topic=art']").first
    mark.focus()
    page.keyboard.press("Enter")
    assert choice(page, "data: topic") == "art"
    at = judged.generations["temperature"] == 0
    if choice(page, "temperature") == "greedy":
        assert counted(page)[1] == at.sum() / 2


def test_what_passes_is_exported(judged, opened, tmp_path):
    page = opened(render_report([judged]))
    option(page, "category", "follow-up")
    with page.expect_download() as download:
        page.get_by_role("button", name="save these turns").click()
    download.value.save_as(tmp_path / "turns.jsonl")
    lines = (tmp_path / "turns.jsonl").read_text("utf-8").splitlines()
    saved = pd.DataFrame([json.loads(line) for line in lines])
    follow_ups = judged.labels.judgements("builtin")["category"] == FOLLOW_UP
    own = judged.generations[follow_ups.to_numpy()]
    expected = list(zip(own["context_id"], own["temperature"], own["text"], strict=True))
    found = list(zip(saved["context_id"], saved["temperature"], saved["user_turn"], strict=True))
    assert sorted(found) == sorted(expected)
    assert {labels["builtin"]["category"] for labels in saved["labels"]} == {FOLLOW_UP}


def test_judges_and_annotators_who_disagree(judged, opened):
    plant(judged, "other", [FOLLOW_UP if i % 2 else "generic" for i in range(60)])
    page = opened(render_report([judged]))
    option(page, "judges and annotators", "disagree")
    one, two = (judged.labels.judgements(name)["follow_up"] for name in ("builtin", "other"))
    assert counted(page)[1] == (one != two).sum() > 0
    option(page, "judges and annotators", "agree")
    assert counted(page)[1] == (one == two).sum() > 0


def test_decoys_are_folded_and_can_be_chosen(run, opened):
    assert judge_main(["run", str(run.path)]) == 0
    decoys = Run.open(run.path).labels.decoys("builtin")
    page = opened(render_report([Run.open(run.path)]))
    row = page.locator(".context").first
    assert counted(page) == (12, 60) and row.locator(".turn").count() == 5
    beneath = int((decoys["shown"] == row.get_attribute("aria-label")).sum())
    row.get_by_text(f"{beneath} turns of other conversations").click()
    playwright.expect(row.locator(".turn")).to_have_count(5 + beneath)
    option(page, "shown after", "a wrong conversation")
    assert counted(page)[1] == (decoys["decoy"] == "wrong_conversation").sum() > 0
    assert "this is a wrong conversation for it" in page.locator(".turn .meta").first.text_content()


def test_tokens_are_shaded_and_add_up(opened):
    contexts, turns = many(2, 1)
    turns["pieces"] = [[2, 3], None]
    turns["text"] = ["😀 on", "whole"]
    turns["reaction_bits"], turns["bits_by_token"] = [1.5, -1.0], [[2.0, -0.5], [1.0]]
    page = opened(rendered_turns(contexts, turns))
    tokens = page.locator(".turn .text span")
    assert tokens.all_text_contents() == ["😀", " on"]
    said = tokens.first.get_attribute("title").splitlines()
    chance = f"p = {np.exp(round(float(turns['logprobs_raw'][0][0]), 2)):.3f} at T = 1"
    assert said == ["2.00 bits", chance, "likeliest here:", '"A" p = 0.500', '"The" p = 0.250']
    assert "likeliest" not in tokens.nth(1).get_attribute("title")
    colours = [tokens.nth(k).evaluate("e => getComputedStyle(e).backgroundColor") for k in (0, 1)]
    assert len(set(colours)) == 2 and "rgba(0, 0, 0, 0)" not in colours
    page.get_by_label("bits from").fill("0")
    assert counted(page) == (1, 1)


def test_a_field_of_the_data_filters_and_a_link_says_what_isnt_there(opened):
    page = opened(rendered_turns(*many(6, 2)))
    page.get_by_label("data: topic").select_option("art")
    assert counted(page) == (3, 6) and "data%3A+topic=art" in page.url
    page.evaluate("location.hash = 'data: topic=music'")
    page.wait_for_function("document.querySelector('#count').textContent.includes('no data')")
    assert "This page has no data: topic music." in page.locator("#count").text_content()
    assert page.get_by_label("data: topic").input_value() == ""


def test_turns_with_sampled_tokens_stand_apart_and_their_rates_lead_to_them(
    tiny_subject, tmp_path, opened
):
    drawn = Settings(limit=6, temperatures=1, samples=2, sampled_tokens="1 all", max_new_tokens=4)
    run = sampled(drawn, tiny_subject, tmp_path / "run")
    plant(run, "builtin", [FOLLOW_UP] * 30)
    for words in ([], ["--sampled-tokens", "1"]):
        assert rates_main([str(run.path), *words]) == 0
    page = opened(render_report([run]))
    assert choice(page, "sampled tokens") == "whole turns" and counted(page) == (6, 18)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for card, turns in (("whole turns", 12), ("1", 12)):
        side = page.locator(f".side[data-drawn='{card.removeprefix('whole turns')}']")
        side.locator("td a[href*='temperature=T+']").first.click()
        assert choice(page, "sampled tokens") == card and counted(page) == (6, turns)
    option(page, "sampled tokens", "")
    assert counted(page) == (6, 24)


def test_hostile_texts_do_nothing(run, opened):
    bad = hostile(run)
    plant(bad, "builtin", CATEGORIES, rationale=[HOSTILE[i % len(HOSTILE)] for i in range(60)])
    page = opened(render_report([bad]))
    for _ in range(2):
        for row in page.locator(".context").all():
            assert row.locator(".turn").count() == 5
            row.locator(".why").first.click()
        further = page.get_by_role("button", name="further")
        if further.is_enabled():
            further.click()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#rows img, #rows svg, #rows a:not([href^='#context='])").count() == 0
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
        page.get_by_role("button", name="3 repeats response").click()
    shown = page.locator("#turn .text").last.text_content()
    assert shown == (sheet.rows[1]["user_turn"] or "(empty)")  # the deferred one comes last
    page.keyboard.press("7")
    assert "All turns are annotated" in page.locator("#turn").text_content()
    with page.expect_download() as download:
        page.keyboard.press("e")
    saved = tmp_path / download.value.suggested_filename
    assert saved.name == f"{sheet.key['sheet']}-filled.csv"
    download.value.save_as(saved)
    import_sheet(judged, saved, "anna")
    own, decoys = judged.labels.annotations("anna"), judged.labels.decoys("anna", "annotations")
    both = pd.concat([own.assign(decoy=None, shown=None), decoys])
    said = {
        (*row[: len(KEY)], row.decoy, row.shown): (row.category, row.note)
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
    assert rates_main([str(judged.path)]) == 0
    page = opened(render_report([judged]), color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert axe(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert axe(page) == []


def many(contexts: int, turns: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Frames of a turn browser: so many contexts, with so many turns each."""
    ids = [f"c{n}" for n in range(contexts)]
    about = pd.DataFrame({"context_id": ids, "run": 0, "dataset": "d", "response_index": None})
    about["query"] = [f"What is {n}?" for n in range(contexts)]
    about["response"] = [f"{n} is a number. " * 20 for n in range(contexts)]
    about["response_unfinished"], about["condition"] = False, "unchanged"
    about[["real_follow_up", "answer", "before", "after"]] = ""
    about["field topic"] = [["maths", "art"][n % 2] for n in range(contexts)]
    about["first"] = [[["A", 0.5], ["The", 0.25]]] * contexts
    count = contexts * turns
    rng = np.random.default_rng(0)
    words = np.array(["a", "lens", "gathers", "the", "lamp", "light", "into", "one", "beam"])
    said = pd.DataFrame(
        {"context_id": np.repeat(ids, turns), "run": 0, "temperature": 1.0, "drawn": 0}
    )
    said["text"] = [" ".join(row) for row in words[rng.integers(0, len(words), (count, 30))]]
    said["logprobs_raw"] = list(-rng.random((count, 30)).astype(np.float32))
    said["logprob_raw"] = -15.0
    said["pieces"] = None
    said["category builtin"] = np.array(NAMES)[rng.integers(0, len(NAMES), count)]
    said["score builtin"] = rng.random(count)
    said["reason builtin"], said["decoy"] = "because", ""
    said["restates"] = said.index == 0
    return about, said


def rendered_turns(contexts: pd.DataFrame, turns: pd.DataFrame) -> str:
    """A page of turns alone."""
    return rendered(
        "report",
        packed(columns_of(contexts, turns, ["run"])),
        **dict.fromkeys(("title", "question", "description", "turns_note", "version"), "t"),
        **dict.fromkeys(
            ("cards", "commands", "without_results", "rubric", "words", "conclusions", "controls"),
            (),
        ),
        heading=heading,
        several=False,
        judge_card="",
        provenance=Table("", [], []),
    )
