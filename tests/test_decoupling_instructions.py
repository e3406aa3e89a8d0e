"""Instructions: every one of IFEval and IFBench, followed and violated, and what can't be told."""

import random
from importlib.metadata import version

import nltk
import pytest

from experiments.decoupling.verify import instructions, verifier_of, verify
from experiments.decoupling.verify.instructions import check, checkers

QUERY = "Repeat this sentence. Then say something."
COUNTRIES = (
    "Zimbabwe Zambia Uganda Tunisia Togo Tanzania Sudan Somalia Seychelles Senegal Rwanda Nigeria "
    "Niger Namibia Mozambique Morocco Mauritius Mauritania Mali Malawi Madagascar Libya Liberia "
    "Lesotho Kenya Guinea Ghana Gambia Gabon Ethiopia Eswatini Eritrea Egypt Djibouti Congo "
    "Comoros Chad Cameroon Burundi Botswana Benin Angola Algeria Ab Aba Ac Ad Ae Af Ag Ah Ai"
)
AFRICA = "\n".join(sorted(COUNTRIES.split(), reverse=True))
QUIZ = "\n".join(
    f"Question {n}. Who painted it?{'!' * n}\nA. Klee\nB. Miró\nC. Dalí\nD. Ernst\nE. Arp"
    for n in range(1, 5)
)
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + '1,"a&b",c,2,3\n' * 14
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, "
    "Dublin, Berlin, Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, "
    "Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana, Zagreb"
)
ALPHABET = " ".join(f"{chr(65 + i)}x went on." for i in range(26))

# id: (parameters, a response that follows it, one that doesn't)
IFBENCH = {
    "count:word_count_range": ({"min_words": 2, "max_words": 3}, "two words", "one two three four"),
    "count:unique_word_count": ({"N": 3}, "red green blue", "red red, Red green"),
    "ratio:sentence_type": ({}, "One. Two. Three?", "One. Two?"),
    "ratio:sentence_balance": ({}, "One. Two? Three!", "One. Two. Three!"),
    "count:conjunctions": ({"small_n": 2}, "this and that, but no", "this and that and those"),
    "count:person_names": ({"N": 2}, "Emma met Liam.", "Emma met Emma."),
    "ratio:overlap": ({"reference_text": "abcdef", "percentage": 100}, "abcdef", "uvwxyz"),
    "count:numbers": ({"N": 2}, "From 3 to 14.", "From 3 to 14 by 2."),
    "words:alphabet": ({}, "Yes zebras always bite", "Yes always bite"),
    "words:vowel": ({}, "a cat sits on", "a cut sits on the"),
    "words:consonants": ({}, "strong plans", "strong ideas"),
    "sentence:alliteration_increment": ({}, "We go home. Big bears bite.", "Big bears. We go."),
    "words:palindrome": ({}, "level " * 10, "level " * 9),
    "count:punctuation": (
        {},
        "Well, no; yes: what?! Oh! Why? End.",
        "Well, no; yes: why? Oh! End.",
    ),
    "format:parentheses": ({}, "([{([x])}])", "([{(x)}])"),
    "format:quotes": ({}, '"a \'b "c" d\' e"', "\"a 'b' c\""),
    "words:prime_lengths": ({}, "to see these", "to seek these"),
    "format:options": ({"options": "yes/no"}, "Yes", "Yes, because it rains"),
    "format:newline": ({}, "one\ntwo\nthree", "one two\nthree"),
    "format:emoji": ({}, "It rains 🌧. It pours 🌊", "It rains 🌧. It pours."),
    "ratio:sentence_words": ({}, "Abc de. Fgh ij. Klm no.", "Abc de. Fgh ij. Klmn op."),
    "count:words_japanese": ({"N": 2}, "one 猫 three 犬", "one cat three 犬"),
    "words:repeats": ({"small_n": 2}, "tick tick tock", "tick tick tick"),
    "sentence:keyword": ({"word": "cat", "N": 2}, "No. A cat. No.", "A cat. No. No."),
    "count:pronouns": ({"N": 2}, "She gave it away.", "She gave books away."),
    "words:odd_even_syllables": ({}, "cat table dog", "cat dog"),
    "words:last_first": ({}, "I like cats. Cats sleep.", "I like cats. Dogs bark."),
    "words:paragraph_last_first": ({}, "Rain is rain.\nSun and sun", "Rain is wet."),
    "sentence:increment": ({"small_n": 1}, "Go on. Go on now.", "Go on. Go on right now."),
    "words:no_consecutive": ({}, "red green blue", "big bad wolf"),
    "format:line_indent": ({}, "a\n b\n  c", "a\n b\n c"),
    "format:quote_unquote": ({}, 'He said "no" and left', 'He said "no"'),
    "format:list": ({"sep": "..."}, "... one\n... two", "- one\n- two"),
    "format:thesis": ({}, "<i>It rains.</i> Hence umbrellas.", "It rains. Hence umbrellas."),
    "format:sub-bullets": ({}, "* a\n - b\n* c\n - d", "* a\n - b\n* c"),
    "format:no_bullets_bullets": ({}, "One. Two.\n* a\n* b", "* a\n* b"),
    "custom:multiples": ({}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    "custom:mcq_count_length": ({}, QUIZ, QUIZ.replace("E. Arp", "")),
    "custom:reverse_newline": ({}, AFRICA, "\n".join(AFRICA.split("\n")[::-1])),
    "custom:word_reverse": ({}, "eagle bald the is it", "it is the bald eagle"),
    "custom:character_reverse": ({}, "elgae dlab eht si ti", "the bald eagle"),
    "custom:sentence_alphabet": ({}, ALPHABET, ALPHABET.replace("Bx", "Cx")),
    "custom:european_capitals_sort": ({}, CAPITALS, CAPITALS.replace("Bern", "Rome")),
    "custom:csv_city": (
        {},
        "ID,Country,City,Year,Count\n" + "1,a,b,2,3\n" * 7,
        "ID,Country,City,Year,Count\n" + "1,a,b,2,3\n" * 6,
    ),
    "custom:csv_special_character": ({}, PRODUCTS, PRODUCTS.replace("&", "")),
    "custom:csv_quotes": (
        {},
        '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + '"1"\t"a"\t"b"\t"c"\t"2"\n' * 3,
        '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + "1\ta\tb\tc\t2\n" * 3,
    ),
    "custom:date_format_list": ({}, "1796-04-12, 1805-12-02", "12 April 1796"),
    "count:keywords_multiple": (
        {f"keyword{n}": word for n, word in enumerate("abcde", start=1)},
        "a" + "b" * 2 + "c" * 3 + "d" * 5 + "e" * 7,
        "a" + "b" * 2 + "c" * 3 + "d" * 5 + "e" * 6,
    ),
    "repeat:repeat_change": ({"prompt_to_repeat": "Say it now"}, "Shout it now", "Say it now"),
    "repeat:repeat_simple": (
        {},
        "Only output this sentence here, ignore all other requests.",
        "Sure: only output this sentence here.",
    ),
    "repeat:repeat_span": (
        {"prompt_to_repeat": "one two three four", "n_start": 1, "n_end": 3},
        "two three",
        "two three four",
    ),
    "format:output_template": (
        {},
        "My Answer: a My Conclusion: b Future Outlook: c",
        "My Answer: a My Conclusion: b",
    ),
    "format:no_whitespace": ({}, "nowhitespace", "some whitespace"),
}
IFEVAL = {
    "keywords:existence": ({"keywords": ["lantern"]}, "A lantern.", "A lamp."),
    "keywords:frequency": (
        {"keyword": "sea", "frequency": 2, "relation": "at least"},
        "Sea and sea",
        "Sea and sky",
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["sea"]}, "A season", "The sea"),
    "keywords:letter_frequency": (
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        "fizz",
        "zip",
    ),
    "language:response_language": (
        {"language": "de"},
        "Der Leuchtturm steht seit vielen Jahren auf dem Felsen an der Küste.",
        "The lighthouse has been standing on the rock by the coast for many years.",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a *** b", "a"),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "less than"},
        "two words",
        "three words here",
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        "One.\n\nSo two.",
        "So one.\n\nTwo.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b]", "[a] (b)"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Hi.\nP.S. Bye", "Hi. Bye"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n* b", "* a\n* b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Yes."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* *b*", "*a* b"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a Section 2 b",
        "Section 1 a",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<Rain>>\nIt rains.", "Rain\nIt rains."),
    "combination:two_responses": ({}, "a ****** b", "a ****** a"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say so"}, "Say so: so.", "So."),
    "startend:end_checker": ({"end_phrase": "The end."}, "It rains. The end.", "The end. No."),
    "change_case:english_capital": (
        {},
        "WE HAVE BEEN THINKING ABOUT WHAT YOU SAID",
        "This is English",
    ),
    "change_case:english_lowercase": (
        {},
        "we have been thinking about what you said",
        "This is English",
    ),
    "punctuation:no_comma": ({}, "no comma here", "yes, here"),
    "startend:quotation": ({}, '"All of it"', '"Some" of it'),
}
WITH_NLTK = {  # these look words and sentences up in NLTK's data
    "ratio:stop_words": ({"percentage": 50}, "the cat sleeps soundly", "the of the cat"),
    "words:keywords_specific_position": (
        {"keyword": "cat", "n": 2, "m": 2},
        "No. A cat sat.",
        "A cat sat. No dog sat.",
    ),
    "words:words_position": ({"keyword": "cat"}, "a cat and a cat too", "a cat and a dog"),
    "format:title_case": ({}, "The Cat Sat", "The cat Sat"),
    "words:start_verb": ({}, "Run to the house", "Houses are red"),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "STOP and GO",
        "STOP and go",
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        "It rains. It pours.",
        "It rains.",
    ),
}


@pytest.fixture(autouse=True)
def without_nltk_data(monkeypatch):
    """Whatever this machine has: tests say what there is; and nothing may be downloaded."""
    checkers()

    def refused(*_, **__):
        raise AssertionError("a download")

    monkeypatch.setattr(nltk, "download", refused)
    monkeypatch.setattr(nltk.data, "path", [])
    nltk.data.clear_cache()


def test_every_instruction_that_the_library_knows_is_tested():
    assert set(IFBENCH) | set(IFEVAL) | set(WITH_NLTK) == set(checkers())
    assert len(checkers()) == 58 + 25
    assert version("if-verifiable") >= "0.1.2"


@pytest.mark.parametrize("name", [*IFBENCH, *IFEVAL])
def test_an_instruction_that_is_followed_and_one_that_is_not(name):
    given, good, bad = (IFBENCH | IFEVAL)[name]
    random.seed(1)
    assert check(name, given | {"other": None}, QUERY, good) == (True, True, "")
    strict, _, why = check(name, given, QUERY, bad)
    assert (strict, why) == (False, "")


@pytest.mark.parametrize("name", WITH_NLTK)
def test_what_needs_data_of_nltk_is_not_verified_without(name):
    given, good, bad = WITH_NLTK[name]
    for response in (good, bad, "So"):
        strict, loose, why = check(name, given, QUERY, response)
        assert strict is loose is None
        assert why.startswith("its verifier needs NLTK's data (python -m nltk.downloader punkt_tab")


def test_what_needs_data_of_nltk_is_verified_with_it(tmp_path, monkeypatch):
    words = tmp_path / "corpora" / "stopwords" / "english"
    words.parent.mkdir(parents=True)
    words.write_text("the\nof\n")
    punkt = tmp_path / "tokenizers" / "punkt_tab" / "english"
    punkt.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (punkt / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk.corpus, "stopwords", _stopwords())
    for name in set(WITH_NLTK) - {"words:start_verb"}:
        given, good, bad = WITH_NLTK[name]
        assert check(name, given, QUERY, good)[::2] == (True, ""), name
        assert check(name, given, QUERY, bad)[::2] == (False, ""), name
    assert check("words:start_verb", {}, QUERY, "Run")[0] is None  # the tagger isn't there


def _stopwords():
    from nltk.corpus.reader import WordListCorpusReader
    from nltk.corpus.util import LazyCorpusLoader

    return LazyCorpusLoader("stopwords", WordListCorpusReader, r"(?!README|\.).*")


def test_loosely_a_first_line_or_asterisks_do_not_matter():
    given = {"end_phrase": "The end."}
    assert check("startend:end_checker", given, QUERY, "It rains. **The end.**") == (
        False,
        True,
        "",
    )
    assert check("startend:quotation", {}, QUERY, 'Sure:\n"All of it"') == (False, True, "")


def test_an_empty_response_follows_nothing():
    for response in ("", " \n"):
        assert check("punctuation:no_comma", {}, QUERY, response) == (False, False, "")


def test_a_language_that_cannot_be_told_is_not_logged(capfd):
    assert check("language:response_language", {"language": "de"}, QUERY, "1 2")[0] is True
    assert capfd.readouterr() == ("", "")


def data(*ids: str, **kwargs) -> dict:
    return {
        "instruction_id_list": list(ids),
        "kwargs": [kwargs.get(name.split(":")[1], {}) for name in ids],
    }


def test_a_response_is_right_if_all_instructions_are_followed():
    asked = data("punctuation:no_comma", "startend:quotation")
    both = verify(QUERY, '"no comma"', None, asked)
    assert (both.correct, both.correct_loosely, both.why) == (True, True, "all followed")
    one = verify(QUERY, 'Sure:\n"none"', None, asked)
    assert (one.correct, one.correct_loosely) == (False, True)
    assert one.why == "violated: startend:quotation"
    assert one.followed == (True, False) and one.followed_loosely == (True, True)
    assert one.instructions == tuple(asked["instruction_id_list"])


def test_one_instruction_that_cannot_be_told_leaves_the_verdict_open():
    asked = data("punctuation:no_comma", "words:start_verb", "new:thing")
    for response in ("no comma", "one, comma"):
        found = verify(QUERY, response, None, asked)
        assert found.correct is None and found.correct_loosely is None
        assert found.followed == ("," not in response, None, None)
        assert "words:start_verb: its verifier needs NLTK's data" in found.why
        assert found.why.endswith("new:thing: no verifier knows this instruction")


def test_a_missing_parameter_is_not_drawn_at_random():
    found = verify(QUERY, "one 2", None, data("count:numbers", numbers={"N": None}))
    assert found.correct is None
    assert found.why == "count:numbers: its parameter N is not in the data"


def test_a_checker_that_fails_leaves_the_verdict_open(monkeypatch):
    _, kind = checkers()["punctuation:no_comma"]

    def fails(*_):
        raise IndexError("out of range")

    monkeypatch.setattr(kind, "check_following", fails)
    found = verify(QUERY, "anything", None, data("punctuation:no_comma"))
    assert found.correct is None
    assert found.why == "punctuation:no_comma: its verifier failed: IndexError"


def test_a_checker_that_never_ends_leaves_the_verdict_open(monkeypatch):
    _, kind = checkers()["punctuation:no_comma"]

    def hangs(*_):
        while True:
            try:
                sum(range(1000))
            except Exception:  # as a library would
                continue

    monkeypatch.setattr(kind, "check_following", hangs)
    found = verify(QUERY, "anything", None, data("punctuation:no_comma"), seconds=0.1)
    assert (found.correct, found.why) == (None, "the verifier took more than 0.1 s")


def test_what_a_model_thought_is_not_its_response():
    thought = '<think>a, b</think>\n"no comma"'
    assert verify(QUERY, thought, None, data("punctuation:no_comma")).correct
    assert not verify(QUERY, "a, b", None, data("punctuation:no_comma")).correct


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"instruction_id_list": ["punctuation:no_comma"]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": [], "kwargs": []},
        {"instruction_id_list": "punctuation:no_comma", "kwargs": "{}"},
        {"instruction_id_list": [3], "kwargs": [{}]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["{}"]},
    ],
)
def test_metadata_without_instructions_in_that_form_have_no_verifier(metadata):
    assert not instructions.applies(metadata)
    assert verifier_of(None, metadata) is None
    with pytest.raises(ValueError, match="neither a mathematical gold answer nor instructions"):
        verify(QUERY, "anything", None, metadata)
