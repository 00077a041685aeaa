"""Chat templates that want endless work or memory: each is one `InputError` in time."""

import pytest

from detspec.checkpoint import template_limits
from tests.checkpoint.test_template_sandbox import render
from tests.hostile import refusal


def twice(first: str, again: str) -> str:
    """A value that is made of two of itself, sixty times."""
    return "{% set ns = namespace(s=" + first + ") %}{% for i in range(60) %}" + again + "{% endfor %}{{ ns.s }}"


def many(body: str) -> str:
    return "{% for i in range(99999) %}" + body + "{% endfor %}"


# Two texts that are equal and not the same, so that Python compares their characters.
LONG = "{{% set x = 'a' * {} %}}{{% set y = x ~ '' %}}"
# A path of attributes that comes back to where it begins.
PATH = "{% set ns = namespace() %}{% set ns.s = ns %}{% set p = 's' ~ '.s' * 1900000 %}"

# Rejected before anything of their size is made.
TOO_LARGE = {
    "times": "{{ 'a' * 10**10 }}",
    "times_reversed": "{{ 10**10 * 'a' }}",
    "times_list": "{{ ([1] * 10**10) | length }}",
    "center": "{{ 'a' | center(10**9) }}",
    "center_constant": "{{ 'a' | center(1000000000) }}",
    "center_method": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "expandtabs": "{{ ('\t' * 99).expandtabs(10**9) }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "to_bytes": "{{ (1).to_bytes(10**9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent_star": "{{ '%*d' % (1000000000, 1) }}",
    "percent_dict": "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "format_filter": "{{ '%1000000000d' | format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format_nested": "{{ '{:{}}'.format(1, 10**9) }}",
    "format_repeated": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "power": "{{ 2 ** 100000 }}",
    "power_of_power": "{{ 9 ** (9 ** 9) }}",
    "square": twice("3", "{% set ns.s = ns.s * ns.s %}"),
    "binary": "{{ ('1' * 4000000) | int(0, 2) % 3 }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace_nothing": "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "replace_filter": "{{ ('a' * 1000000) | replace(old='a', new='b' * 1000000) }}",
    "replace_block": "{% filter replace('a', 'b' * 1000000) %}" + "a" * 10000 + "{% endfilter %}",
    "join": "{{ ('a' * 1000000).join('b' * 1000000) }}",
    "join_filter": "{{ range(99999) | join('a' * 1000000) }}",
    "join_attribute": "{{ ([messages[0]] * 99999) | map(attribute='content') | join }}",
    "indent": "{{ ('a\n' * 1000000) | indent(10**6) }}",
    "indent_text": "{{ ('a\n' * 1000000) | indent(width='x' * 1000000) }}",
    "tojson": "{{ messages | tojson(indent=10**9) }}",
    "tojson_deep": twice("[]", "{% for j in range(14) %}{% set ns.s = [ns.s] %}{% endfor %}")
    + "{{ ns.s | tojson(indent=16) }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "sum": "{{ ([[1]] * 9999) | sum(start=[]) }}",
    "texts": twice("'ab'", "{% set ns.s = ns.s ~ ns.s %}"),
    "texts_plus": twice("'ab'", "{% set ns.s = ns.s + ns.s %}"),
    "texts_set": twice("'ab'", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"),
    "lists": twice("[1]", "{% set ns.s = [ns.s, ns.s] %}"),
    "tuples": twice("[1]", "{% set ns.s = (ns.s, ns.s) %}"),
    "objects": twice("{}", "{% set ns.s = {'a': ns.s, 'b': ns.s} %}"),
    "objects_called": twice("{}", "{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
    "views": twice("{'a': 1}", "{% set v = ns.s.values() %}{% set ns.s = {'a': v, 'b': v} %}"),
    "source": "x" * 1_000_000,
    "odd_text": "{{ '%1000000000d' is odd }}",
    "divisible_text": "{{ '%1000000000d' is divisibleby(3) }}",
    "round_text": "{{ 'a' | round(9, 'ceil') }}",
    "round_list": "{{ [1] | round(8, 'ceil') }}",
    "tags": "{% set x = '<!---->' * 500000 %}{{ (x | safe).striptags() }}",
    "maketrans": "{{ 'a'.maketrans('a', 'b') }}",
    "search_from_the_end": "{% set x = 'a' * 2000000 %}{% set y = 'ab' ~ 'a' * 1000000 %}{{ x.rfind(y) }}",
    "split_from_the_end": "{% set x = 'a' * 2000000 %}{% set y = 'ab' ~ 'a' * 1000000 %}{{ x.rsplit(sep=y) }}",
    "strip_of_many": "{% set x = 'a' * 2000000 %}{% set y = 'b' * 1000000 ~ 'a' %}{{ x.strip(y) }}",
    "trim_of_many": "{% set x = 'a' * 2000000 %}{% set y = 'b' * 1000000 ~ 'a' %}{{ x | trim(y) }}",
    "path": PATH + "{{ ([ns] * 1000) | map(attribute=p) | list | length }}",
    "path_of_values": PATH + "{{ dict(a=ns, b=ns).values() | selectattr(p) | list | length }}",
    "paths": "{% set p = 'a,' * 1900000 %}{{ range(9999) | sort(attribute=p) | length }}",
}
# Rejected after so many steps or characters.
TOO_LONG = {
    "loops": many(many("")),
    "loops_text": many(many("abcdefgh")),
    "loops_of_text": "{% for a in messages[0].content %}{% for b in messages[0].content %}{% for c in messages[0].content %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops_filtered": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops_left": many(many("{% continue %}")),
    "loops_over_keys": many("{% for k, v in messages[0].items() %}{% for c in v %}{% endfor %}{% endfor %}"),
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "callers": "{% macro m() %}"
    + many("{{ caller() }}")
    + "{% endmacro %}{% call m() %}{% call m() %}x{% endcall %}{% endcall %}",
    "output": "{% set a = 'a' * 4000000 %}{% macro m() %}" + many("{{ a }}") + "{% endmacro %}{{ m() }}",
    "output_data": "{% macro m() %}" + many("x" * 100_000) + "{% endmacro %}{{ m() }}",
    "output_lists": "{% set a = ['\0' * 1000000] * 4 %}" + many("{{ a }}"),
    "output_names": many("{{ i }}" * 1000),
    "comparisons": "{% set a = [1] * 200000 %}{% set b = [1] * 200000 %}" + many("{% if a == b %}{% endif %}"),
    "tests": "{% set a = [1] * 200000 %}{% set b = [1] * 200000 %}" + many("{% if a is eq(b) %}{% endif %}"),
    "changes": "{% set a = [1] * 200000 %}" + many("{% if loop.changed(a[:]) %}{% endif %}"),
    "slices": "{% set a = [1] * 200000 %}" + many("{% set b = a[1:] %}"),
    "splits": many("{% set x = messages[0].content.split() %}"),
    "lists": many("{% set x = range(99999) | list %}"),
    "sorts": many("{% set x = range(99999) | sort %}"),
    "selections": many("{% for x in range(99999) | select('none') %}{% endfor %}"),
    "maps": "{{ range(99999) | map('center', 9999) | list | length }}",
    "steps_given_back": many("{% set x = -1000 | _step %}" + many("")),
    "steps_not_a_number": "{% set x = 'nan' | float | _step %}" + many(many("")),
    "characters": LONG.format(200_000) + many("{{ x | reject | list | length }}"),
    "concatenations": LONG.format(4_000_000) + many("{% set d = {x ~ i: 1} %}"),
    "searches_of_lists": "{% set a = [1] * 200000 %}" + many("{{ a.count(2) }}"),
    "searches_of_ranges": many("{{ range(99999).count(0.5) }}"),
    "keys": many("{% set x = {}.fromkeys(range(99999), messages) %}"),
}
# Rejected after a few characters of many: what a pass of the loop reads counts, though it makes nothing of its size.
READING = {
    "receiver": "{{ x.count('b') }}",
    "receiver_from_the_end": "{{ x.rfind('b') }}",
    "receiver_asked": "{{ x.isalpha() }}",
    "receiver_of_format": "{{ x.format(1) | length }}",
    "argument": "{{ x.endswith(y) }}",
    "argument_of_format": "{{ '{!r:.1}'.format(x) }}",
    "argument_of_percent": "{{ '%.1r' % x }}",
    "argument_of_format_filter": "{{ '%.1r' | format(x) }}",
    "filter": "{{ x | trim | length }}",
    "filter_of_words": "{{ x | wordcount }}",
    "test": "{{ x is lower }}",
    "key": "{% set d = {x: 1} %}{{ d[y] }}",
    "key_asked": "{{ {x: 1}.get(y) }}",
    "list_compared": "{{ [x] == [y] }}",
    "list_searched": "{{ x in [y] }}",
    "list_tested": "{{ x is in [y] }}",
    "entries_tested": "{{ [x] | select('eq', y) | list | length }}",
    "changes": "{{ loop.changed([x ~ '']) }}",
}
# Not within what Python or jinja2 can do.
TOO_DEEP = {
    "macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "recursive_loop": "{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "parentheses": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "brackets": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "minus": "{{ " + "-" * 100_000 + "1 }}",
    "sum": "{{ 1" + "+1" * 5_000 + " }}",
    "attributes": "{{ a" + ".a" * 5_000 + " }}",
    "ifs": "{% if a %}" * 2_000 + "{% endif %}" * 2_000,
    "fors": "{% for a in a %}" * 30 + "{% endfor %}" * 30,
    "digits": "{{ " + "9" * 100_000 + " }}",
    "hexadecimal": "{{ 0x" + "f" * 50_000 + " is divisibleby(0x" + "e" * 20_000 + ") }}",
    "unclosed": "{{" * 50_000,
    "include": "{% include 'a' %}",
    "import": "{% import 'a' as b %}",
    "environment": "{{ self._TemplateReference__context.environment }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "random": "{{ [1, 2] | random }}",
}


@pytest.mark.parametrize(
    "source", [*TOO_LARGE.values(), *TOO_DEEP.values()], ids=[*TOO_LARGE, *(f"deep_{id}" for id in TOO_DEEP)]
)
def test_template_that_asks_for_too_much_at_once_is_one_error(source):
    refusal(lambda: render(source))


@pytest.mark.parametrize("source", TOO_LONG.values(), ids=TOO_LONG)
def test_template_that_goes_on_too_long_is_one_error(source, monkeypatch):
    """With a twentieth of the steps; the next test has all of them."""
    monkeypatch.setattr(template_limits, "MAX_STEPS", template_limits.MAX_STEPS // 20)
    assert "it takes more than" in (message := refusal(lambda: render(source))) or "it makes" in message


@pytest.mark.parametrize("body", READING.values(), ids=READING)
def test_template_that_reads_a_long_text_again_and_again_is_one_error(body):
    """Forty passes of two million characters are more than the budget, and of two thousand they are less."""
    loop = "{% for i in range(40) %}" + body + "{% endfor %}"
    assert "it makes texts of more than" in refusal(lambda: render(LONG.format(2_000_000) + loop))
    assert isinstance(render(LONG.format(2_000) + loop), str)


@pytest.mark.parametrize("source", ["loops", *(pytest.param(id, marks=pytest.mark.slow) for id in TOO_LONG if id != "loops")])
def test_template_that_uses_up_all_its_steps_ends_in_time(source):
    refusal(lambda: render(TOO_LONG[source]))
