"""What a rule must look like, and what the reader refuses."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.kernels import Rule, build
from aiops.kernels import vocabulary as words
from aiops.kernels.rule_parser import parse
from aiops.kernels.vocabulary import sqrt, where
from tests.rows import each_row

EPSILON = 1e-4


def sgd(w, g, step):
    return (w - step * g,)


def momentum(w, g, m, step, decay):
    m = decay * m + g
    return w - step * m, m


def told(w, g, sent, m, step, late, decay):
    m = decay * m + late * (w - sent)
    return w - step * m, m


def test_a_rule_keeps_what_it_is_given() -> None:
    state = {"m": 0.0}
    rule = Rule(momentum, state, {"decay": 0.9}, statistic="m")
    state["m"] = 5.0
    assert rule.state == {"m": 0.0}
    assert rule.name == "momentum"
    assert rule == Rule(momentum, {"m": 0.0}, {"decay": 0.9}, "m")


@each_row(
    ("function", "options", "message"),
    [
        (momentum, {}, r"written as \(w, g, m, step, decay\).*must be \(w, g, step\)"),
        (momentum, {"state": {"decay": 0.0}, "constants": {"m": 1.0}}, "rename or reorder"),
        (lambda w, g, *step: (w,), {}, r"\(w, g, \*step\)"),
        (lambda w, gradient, step: (w,), {}, "gradient"),
        (sgd, {"state": {"step": 0.0}}, "'step' twice"),
        (sgd, {"statistic": "v"}, "statistic 'v'.*it has none"),
        (
            momentum,
            {"state": {"m": 0.0}, "constants": {"decay": 1.0}, "statistic": "m", "gauge": True},
            "statistic 'm' and a gauge.*drop one",
        ),
        (
            momentum,
            {"state": {"m": float("nan")}, "constants": {"decay": 1.0}},
            "has nan as the value of 'm' in st",
        ),
        (
            momentum,
            {"state": {"m": 0.0}, "constants": {"decay": float("inf")}},
            "has inf as the value of 'decay'",
        ),
        (told, {"state": {"m": 0.0}, "scalars": ("late", "decay")}, r"must be \(w, g, m, step, la"),
        (told, {"state": {"sent": 0.0}, "reads": ("m",)}, "rename or reorder"),
        (sgd, {"scalars": ("step",)}, "'step' twice"),
        (momentum, {"state": ["m"]}, r"has state=\['m'\], which gives no values: map each name to"),
        (momentum, {"constants": ("decay",)}, r"has constants=\('decay',\), which gives no values"),
        (momentum, {"state": {"m": "0"}}, "has '0' as the value of 'm' in state"),
        (told, {"reads": "sent"}, r"has reads='sent', a text: write a tuple .*\('sent',\)"),
        (sgd, {"state": {"m": 0.0}, "reads": ("m",)}, "'m' twice.*the reads, the state arrays"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_at_once(function, options, message) -> None:
    with pytest.raises(UsageError, match=message):
        Rule(function, **options)


def test_the_parameters_of_a_rule_have_an_order() -> None:
    rule = Rule(told, {"m": 0.0}, {"decay": 0.9}, scalars=("late",), reads=["sent"])
    assert rule.parameters == ("w", "g", "sent", "m", "step", "late", "decay")
    assert rule.reads == ("sent",)
    assert rule.results == "(w, m)"


def test_a_name_is_a_scalar_or_a_constant_and_each_is_read_as_what_it_is() -> None:
    """The same function and names, told apart only by what they are."""
    one = parse(Rule(told, {"m": 0.0}, {"decay": 0.9}, scalars=("late",), reads=("sent",)))
    two = parse(Rule(told, {"m": 0.0}, {"late": 1.0, "decay": 0.9}, reads=("sent",)))
    three = parse(Rule(told, {"m": 0.0}, scalars=("late", "decay"), reads=("sent",)))
    assert (one.scalars, one.constants) == (("late",), ("decay",))
    assert (two.scalars, two.constants) == ((), ("late", "decay"))
    assert (three.scalars, three.constants) == (("late", "decay"), ())
    assert one.reads == two.reads == three.reads == ("sent",)


# Each of these breaks the vocabulary on the line marked with an arrow.


def loop(w, g, step):
    for _ in range(3):  # <-
        w = w - step * g
    return (w,)


def while_loop(w, g, step):
    while True:  # <-
        w = w - g
    return (w,)


def branch(w, g, step):
    if step > 0:  # <-
        w = w - step * g
    return (w,)


def ternary(w, g, step):
    return (w if step > 0 else g,)  # <-


def exponential(w, g, step):
    return (w - step * np.exp(g),)  # <-


def power(w, g, step):
    return (w - step * g**2,)  # <-


def floor_division(w, g, step):
    return (w // g,)  # <-


def unknown(w, g, step):
    return (w - rate * g,)  # noqa: F821  <-


def module_value(w, g, step):
    return (w - step * g / EPSILON,)  # <-


def plain_numpy(w, g, step):
    return (w - step * np.maximum(g, 0.0),)  # <-


def method(w, g, step):
    return (w - step * g.mean(),)  # <-


def subscript(w, g, step):
    return (w - step * g[0],)  # <-


def in_place(w, g, step):
    w -= step * g  # <-
    return (w,)


def item_assignment(w, g, step):
    w[0] = g  # <-
    return (w,)


def unpacking(w, g, step):
    a, b = w, g  # <-
    return (a - step * b,)


def walrus(w, g, step):
    return ((a := w) - step * a,)  # <-


def early_return(w, g, step):
    return (w,)  # <-
    return (w - step * g,)


def no_return(w, g, step):  # <-
    w = w - step * g


def not_a_tuple(w, g, step):
    return w - step * g  # <-


def too_many(w, g, step):
    return w - step * g, g  # <-


def mask_product(w, g, step):
    return (w - (g > 0) * step,)  # <-


def mask_result(w, g, step):
    return (g > 0,)  # <-


def mask_sum(w, g, step):
    above = g > 0
    return (w + above,)  # <-


def mask_and(w, g, step):
    return (where((g > 0) & (w > 0), w, g),)  # <-


def boolean_and(w, g, step):
    return (where(g > 0 and w > 0, w, g),)  # <-


def boolean_not(w, g, step):
    return (where(not g > 0, w, g),)  # <-


def chain(w, g, step):
    return (where(0 < g < 1, w, g),)  # <-


def number_condition(w, g, step):
    return (where(g, w, g),)  # <-


def literal_condition(w, g, step):
    return (where(1, w, g),)  # <-


def literal_branches(w, g, step):
    one = 1.0
    return (w - step * where(g > 0, one, -1.0),)  # <-


def literal_word(w, g, step):
    return (w - g * sqrt(2.0),)  # <-


def literal_comparison(w, g, step):
    return (where(1 > 0, w, g),)  # <-


def literal_zero_division(w, g, step):
    return (w - g * (1 / 0),)  # <-


def huge_literal(w, g, step):
    return (w - g * 1e39,)  # <-


def truth_literal(w, g, step):
    return (w - g * True,)  # <-


def text_literal(w, g, step):
    return (w - "g",)  # <-


def too_few_arguments(w, g, step):
    return (where(g > 0, w),)  # <-


def keyword_argument(w, g, step):
    return (sqrt(x=w),)  # <-


def starred(w, g, step):
    return (where(*(g > 0, w, g)),)  # <-


def builtin_name(w, g, step):
    max = w - g  # <-
    return (max,)


def underscore_name(w, g, step):
    _w = w - g  # <-
    return (_w,)


def shadowed_word(w, g, step):
    sqrt = w
    return (sqrt(g),)  # <-


def with_block(w, g, step):
    with np.errstate():  # <-
        w = w - g
    return (w,)


def word_as_value(w, g, step):
    return (w - sqrt,)  # <-


def other_attribute(w, g, step):
    return (words.WORDS(w),)  # <-


def matrix_product(w, g, step):
    return (w @ g,)  # <-


def deletion(w, g, step):
    del step  # <-
    return (w - g,)


REFUSED = [
    loop,
    while_loop,
    branch,
    ternary,
    exponential,
    power,
    floor_division,
    unknown,
    module_value,
    plain_numpy,
    method,
    subscript,
    in_place,
    item_assignment,
    unpacking,
    walrus,
    early_return,
    no_return,
    not_a_tuple,
    too_many,
    mask_product,
    mask_result,
    mask_sum,
    mask_and,
    boolean_and,
    boolean_not,
    chain,
    number_condition,
    literal_condition,
    literal_branches,
    literal_word,
    literal_comparison,
    literal_zero_division,
    huge_literal,
    truth_literal,
    text_literal,
    too_few_arguments,
    keyword_argument,
    starred,
    builtin_name,
    underscore_name,
    shadowed_word,
    with_block,
    word_as_value,
    other_attribute,
    matrix_product,
    deletion,
]


@each_row("backend", ["numpy", "numba"])
@each_row("function", REFUSED, ids=lambda function: function.__name__)
def test_what_lies_outside_the_vocabulary_is_refused_by_name_and_line(function, backend) -> None:
    with open(__file__) as file:
        lines = file.read().splitlines()
    first = function.__code__.co_firstlineno
    marked = next(n for n in range(first, first + 9) if lines[n - 1].endswith("<-"))
    with pytest.raises(UsageError) as caught:
        build(Rule(function), np.float32, backend)
    assert caught.value.details == {"rule": function.__name__, "line": marked}
    assert f"rule {function.__name__!r} ({__file__}:{marked}) " in str(caught.value)


@each_row(
    ("function", "phrase"),
    [
        (loop, "uses a loop, `for _ in range(3):`"),
        (exponential, "calls np.exp; a rule may use"),
        (power, "uses a power, `g ** 2`"),
        (unknown, "uses the unknown name 'rate'"),
        (not_a_tuple, "does not return a tuple of 1; return (w,)"),
        (no_return, "does not end with a return; end it with return (w,)"),
        (in_place, "assigns in place"),
        (mask_product, "uses a comparison as a number"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_refusal_names_the_construct(function, phrase) -> None:
    with pytest.raises(UsageError) as caught:
        build(Rule(function), np.float32, "numpy")
    assert phrase in str(caught.value)


def test_a_closure_is_refused() -> None:
    rate = 0.5

    def closure(w, g, step):
        return (w - rate * g,)

    with pytest.raises(UsageError, match="closure over rate; pass such values as constants"):
        build(Rule(closure), np.float32)


def test_a_lambda_a_decorated_function_and_a_partial_are_refused() -> None:
    @functools.wraps(sgd)
    def wrapper(w, g, step):
        return (w,)

    @functools.cache
    def cached(w, g, step):
        return (w,)

    with pytest.raises(UsageError, match="lambda or decorated"):
        build(Rule(lambda w, g, step: (w,)), np.float32)
    with pytest.raises(UsageError, match="lambda or decorated"):
        build(Rule(wrapper), np.float32)
    with pytest.raises(UsageError, match="write it as a plain function"):
        build(Rule(cached), np.float32)
    with pytest.raises(UsageError, match="is a partial; write it as a plain function"):
        build(Rule(functools.partial(sgd)), np.float32)


def test_a_rule_without_source_is_refused() -> None:
    scope: dict[str, object] = {}
    exec("def hidden(w, g, step):\n    return (w,)", scope)
    with pytest.raises(UsageError, match="source of rule 'hidden' cannot be read"):
        build(Rule(scope["hidden"]), np.float32, "numpy")


@each_row("dtype", [np.int32, np.dtype(">f4"), np.longdouble])
def test_other_dtypes_are_refused(dtype) -> None:
    with pytest.raises(UsageError, match="choose native float32, float64, float16 or bfloat16"):
        build(Rule(sgd), dtype)
