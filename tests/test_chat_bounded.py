"""Templates within limits: the same text as ``apply_chat_template``, and no endless ones."""

import copy
import threading
import time
import tracemalloc

import families
import pytest

from ia_mech.chat import bounded
from ia_mech.chat.format import ChatFormat
from ia_mech.chat.template import ChatTemplate
from ia_mech.errors import UserError

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
SAID = {
    "one": [(USER, "What is it?")],
    "three": [(USER, "What is it? "), (ASSISTANT, " It's\n\nblue. "), (USER, "<b>Why</b> & how?")],
    "system": [
        (SYSTEM, "Be brief."),
        (USER, "What?"),
        (ASSISTANT, ""),
        (USER, "日本 \u202e {{ x }}"),
    ],
    "thinking": [(USER, "1+1?"), (ASSISTANT, "<think>\nhm\n</think>\n\n2"), (USER, "Sure?")],
    "last": [(USER, "a" * 5000), (ASSISTANT, "b\tc\\n 'quoted' \"twice\"")],
}
OPTIONS = ({}, {"add_generation_prompt": True}, {"enable_thinking": False})


def dialogue(said) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def with_template(source: str):
    tokenizer = copy.deepcopy(families.build("smollm2"))
    tokenizer.chat_template = source
    return tokenizer


def rendered(tokenizer, messages, options) -> str | None:
    """By transformers; None if the template refuses."""
    source = tokenizer.chat_template.replace("strftime_now('%d %b %Y')", "'01 Jan 2026'")
    source = source.replace("strftime_now('%Y-%m-%d')", "'2026-01-01'")
    assert "strftime_now(" not in source.partition("#}")[2]
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, **options
        )
    except Exception:
        return None


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_text_is_that_of_apply_chat_template(family, said):
    tokenizer = families.build(family)
    template = ChatTemplate(tokenizer)
    for options in OPTIONS:
        expected = rendered(tokenizer, dialogue(said), options)
        if expected is None:
            with pytest.raises(UserError, match="the chat template refuses the roles"):
                template.render(dialogue(said), **options)
        else:
            assert template.render(dialogue(said), **options) == expected


# Every statement and the usual filters, tests and methods of templates, and what the charges touch.
CONSTRUCTS = """\
{%- set ns = namespace(n=0, text='', found=false) -%}
{% macro turn(role, text='none') -%}
<{{ role ~ varargs|length ~ kwargs|length }}>{{ text }}{% if caller %}{{ caller() }}{% endif %}
{%- endmacro %}
{%- set a, b = 'x', ['y', ('z', {'k': [1, 2.5, none, true]})] %}
{{ a + 'b' + a ~ b }} {{ 3 * 'ab' }} {{ [1] * 2 + [3] }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ -7 // 2 }}
{{ '%s is %5.1f%%' % ('it', 1.25) }} {{ '%s-%d'|format('a', 3) }} {{ '{0}{k:>4}'.format(1, k=2) }}
{% for m in messages if m.role != 'tool' %}
{{ loop.index }}/{{ loop.length }}{{ loop.previtem.role if loop.previtem is defined }}
{%- set ns.n = ns.n + m['content']|length %}
{%- set ns.text = ns.text ~ m.content|trim|upper|replace('A', 'aa') + ';' %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}
{%- if loop.first %}{% continue %}{% endif %}{{ turn(m.role, m.content.strip(), 1, 2, k=3) }}
{% else %}empty{% endfor %}
{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% if v > 1 %}{% break %}{% endif %}
{%- endfor %}
{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}
{% set block | trim %} {{ ns.text }} {% endset %}[{{ block }}]
{% filter lower|indent(2) %}A
B{% endfilter %}{% call turn('c') %}called{% endcall %}
{{ messages|map(attribute='role')|unique|join(', ') }} {{ messages[1:]|length }} {{ messages[-1] }}
{{ ', '.join(['a', 'b']) }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ [3, 1]|sort|tojson }} {{ {'a': 'é<'}|tojson(indent=2) }} {{ 'a b'.split()|last }} {{ b|string }}
{{ range(3)|list }} {{ range(5)|select('in', [1, 2])|sum }}
{{ undefined_name }}|{{ none }}|{{ 1.0 }}
{{ 'a' in 'abc' and 'x' not in ['y'] }} {{ '</think>'.rstrip('>')|e }} {{ dict(a=1)['a'] }}
{% raw %}{{ raw }}{% endraw %}{# comment #}{{ bos_token }}{{ tools }}{{ documents is none }}
{{ cycler('o', 'e').next() }}{{ joiner(',')() }}{% with q = a %}{{ q }}{% endwith %}
{% autoescape true %}{{ '<' ~ a }}{% endautoescape %}{{ 'x'.center(5)|wordcount }}
"""


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_every_construct_renders_as_before(said):
    tokenizer = with_template(CONSTRUCTS)
    for options in OPTIONS:
        expected = tokenizer.apply_chat_template(dialogue(said), tokenize=False, **options)
        assert ChatTemplate(tokenizer).render(dialogue(said), **options) == expected


def test_the_date_is_pinned_and_errors_are_the_template_s():
    source = "{{ strftime_now('%d %b %Y, %A %j %G') }}"
    text = ChatTemplate(with_template(source), "2026-03-04").render(dialogue(SAID["one"]))
    assert text == "04 Mar 2026, Wednesday 063 2026"
    broken = with_template("{{ raise_exception('no\\n\\u001b[31m' ~ 'such' * 1000) }}")
    with pytest.raises(UserError) as refused:
        ChatTemplate(broken).render(dialogue(SAID["one"]))
    assert str(refused.value).startswith("the chat template refuses the roles user (no); use")


# -- templates without end ------------------------------------------------------------------------

X = "{% set x = 'x' * 1000000 %}"
LIST = "{% set l = range(100000)|list %}"
MAKES, WRITES, TAKES, NESTED, LONG = "makes", "writes", "takes", "is nested", "has more than"


def loops(*bodies: str) -> str:
    """Loops within each other, around the last of these."""
    source = bodies[-1]
    for body in reversed(bodies[:-1]):
        source = f"{{% for _ in range(100000) %}}{body}{source}{{% endfor %}}"
    return source


def doubled(expression: str, start: str = "'x'") -> str:
    body = f"{{% for _ in range(99) %}}{{% set ns.x = {expression} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}{body}{{{{ ns.x }}}}"


ENDLESS = {
    "text": (loops("", "", "{{ 'x' }}" + " and more" * 50), WRITES),
    "text in a block": ("{% set t %}" + loops("", "", "more " * 500) + "{% endset %}", MAKES),
    "product": ("{{ 'x' * 5000000000 }}", MAKES),
    "product of a list": ("{% set l = 5000000000 * [1] %}", MAKES),
    "power": ("{{ 10 ** 1000000000 }}", MAKES),
    "sums": (doubled("ns.x + ns.x"), MAKES),
    "sums on lines": ("{% set x = 'x' * 99 %}" + "{% set x = x + x %}" * 60, MAKES),
    "joined": (doubled("ns.x ~ ns.x"), MAKES),
    "printed": (
        doubled("0").replace(
            "{% set ns.x = 0 %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
        ),
        MAKES,
    ),
    "join": (doubled("[ns.x, ns.x]|join"), MAKES),
    "format": (doubled("'{0}{0}'.format(ns.x)"), MAKES),
    "namespaces": (
        doubled("namespace(a=ns.x, b=ns.x)", "1"),
        "refuses the roles user (a namespace",
    ),
    "center": ("{{ 'x'|center(1000000000) }}", MAKES),
    "ljust": ("{{ 'x'.ljust(1000000000) }}", MAKES),
    "filter block": ("{% filter center(1000000000) %}x{% endfilter %}", MAKES),
    "percent": ("{{ '%1000000000s' % 'x' }}", MAKES),
    "percent star": ("{{ '%*d' % (1000000000, 1) }}", MAKES),
    "percent filter": ("{{ '%1000000000s'|format('x') }}", MAKES),
    "percent often": ("{{ ('%999999d' * 999)|format(*([1] * 999)) }}", MAKES),
    "width": ("{{ '{:1000000000}'.format(1) }}", MAKES),
    "given width": ("{{ '{:{w}}'.format(1, w=1000000000) }}", MAKES),
    "mapped width": ("{{ '{a:1000000000}'.format_map({'a': 1}) }}", MAKES),
    "replace": (X + "{{ x.replace('x', x) }}", MAKES),
    "replace filter": (X + "{{ x|replace('', x) }}", MAKES),
    "separator": (X + "{{ range(100000)|join(x) }}", MAKES),
    "separator of a generator": (X + "{{ x.join(range(100000)|map('string')) }}", MAKES),
    "mapped": (X + "{{ ([x] * 9)|map('replace', 'x', 'xxxxxxxxx')|list|length }}", MAKES),
    "tabs": ("{{ ('\t' * 1000000).expandtabs(1000000) }}", MAKES),
    "indent": ("{{ ('\n' * 1000000)|indent(1000000) }}", MAKES),
    "translate": (X + "{{ x.translate({120: x}) }}", MAKES),
    "indented JSON": ("{{ ([[1]] * 100000)|tojson(indent=1000000) }}", MAKES),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", NESTED),
    "recursive block": ("{% block a %}{{ self.a() }}{% endblock %}", NESTED),
    "brackets": ("{{ " + "[" * 5000 + "]" * 5000 + " }}", NESTED),
    "many terms": ("{{ 1" + " + 1" * 3000 + " }}", NESTED),
    "many loops": ("{% for _ in [1] %}" * 99 + "{% endfor %}" * 99, "(too many levels of"),
    "long": ("x" * 300_000, LONG),
    "random text": ("{{ lipsum(10) }}", "'lipsum' is undefined"),
}
SLOW = {  # these end by the clock
    "loops": loops("", "", ""),
    "loops over nothing": loops("", "{% for _ in range(100000) if false %}{% endfor %}"),
    "calls": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "tests": LIST + "{{ l|select('in', l)|list|length }}",
    "sorting": LIST + loops("{% set s = l|sort %}", ""),
    "constants": "{{ 'abc'|slice(100000)|list|length }}" * 100,
    "shared lists": doubled("[ns.x, ns.x]", "1"),
    "shared pairs": doubled("(ns.x, ns.x)", "1"),
    "shared objects": doubled("dict(a=ns.x, b=ns.x)", "1"),
    "generation": loops("", "{% generation %}x{% endgeneration %}" * 9, ""),
    "squares": doubled("ns.x * ns.x", "3"),
}


def refusal(source: str) -> str:
    with pytest.raises(UserError) as refused:
        ChatTemplate(with_template(source)).render(dialogue(SAID["one"]))
    said = str(refused.value)
    assert "\n" not in said and said.startswith("the ") and " chat template " in said
    assert said.count("; ") == 1 and len(said) < 300
    return said


@pytest.mark.parametrize(("source", "said"), ENDLESS.values(), ids=ENDLESS)
def test_what_makes_too_much_is_refused(source, said):
    before = time.process_time()
    assert said in refusal(source)
    assert time.process_time() - before < 10


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ENDLESS, *SLOW])
def test_little_memory_is_taken_before(case, monkeypatch):
    """At most 1.5 GB more than before: a few texts of 50 million characters, or lists of items."""
    monkeypatch.setattr(bounded, "SECONDS", 1.0)
    source = ENDLESS[case][0] if case in ENDLESS else SLOW[case]
    tracemalloc.start()
    refusal(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_500_000_000


def test_the_limits_are_in_the_refusals():
    assert refusal(ENDLESS["text"][0]) == (
        "the chat template writes more than 1,000,110 characters for a dialogue of 11 "
        "characters; use a model with another chat template, or correct this one"
    )
    assert "makes more than 50,005,500 characters for" in refusal(ENDLESS["product"][0])
    assert "has more than 200,000 characters, too many for" in refusal(ENDLESS["long"][0])


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(s, id=name, marks=() if name == "loops" else pytest.mark.slow)
        for name, s in SLOW.items()
    ],
)
def test_what_takes_too_long_is_refused(source, monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 0.1)
    before = time.process_time()
    text = refusal(source)
    assert "takes more than 0.1 s of processor time" in text or "makes more than" in text
    assert time.process_time() - before < 10


def test_a_limit_reached_once_does_not_last():
    template = ChatTemplate(
        with_template("{% if messages|length > 1 %}{{ 'x' * 10**10 }}{% endif %}a")
    )
    with pytest.raises(UserError, match="makes more than"):
        template.render(dialogue(SAID["three"]))
    assert template.render(dialogue(SAID["one"])) == "a"


def test_limits_hold_in_every_thread():
    said = []
    threads = [
        threading.Thread(target=lambda s=s: said.append(refusal(s)))
        for s in (ENDLESS["product"][0], ENDLESS["text"][0])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted("writes" in text for text in said) == [False, True]


def test_long_dialogues_are_within_the_limits():
    """Templates that gather the text so far, turn by turn, make far more than they write."""
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.role ~ ': ' ~ "
        "m.content ~ '\n' %}{% endfor %}{{ ns.t }}"
    )
    said = [((USER, ASSISTANT)[i % 2], "word " * 200) for i in range(200)]
    expected = "".join(f"{role}: {content}\n" for role, content in said)
    assert ChatTemplate(with_template(source)).render(dialogue(said)) == expected


def test_a_format_is_not_derived_from_an_endless_template():
    with pytest.raises(UserError, match="the chat template makes more than"):
        ChatFormat(with_template(ENDLESS["product"][0]))
