"""Cases from public bug reports, through the neutral interface of `attention_cases`."""

import functools

import numpy as np
import pytest

import attention_cases
import scaledot as sd
from candidate import candidate

MAY_BE_UNSUPPORTED = {"ring"}


@pytest.fixture(autouse=True)
def _same_threads_after():
    yield
    sd.set_num_threads(None)


WITH_GRADIENTS = [
    case for case in attention_cases.CASES
    if set(case["want"]) & {"dq", "dk", "dv", "dbias"} and case["op"] not in MAY_BE_UNSUPPORTED
]


@pytest.mark.parametrize("case", WITH_GRADIENTS, ids=lambda case: case["id"])
def test_gradients_by_torch(case):
    pytest.importorskip("torch")
    with np.errstate(all="ignore"):
        assert not attention_cases.run_case(case, functools.partial(candidate, library="torch"))


@pytest.mark.parametrize("impl", ["auto", "blockwise", "dense"])
@pytest.mark.parametrize("case", attention_cases.CASES, ids=lambda case: case["id"])
def test_shared_case(case, impl, record_property):
    try:
        with np.errstate(all="ignore"):  # the oracle's own arithmetic
            failures = attention_cases.run_case(case, functools.partial(candidate, impl=impl))
    except attention_cases.Unsupported as reason:
        record_property("unsupported", case["id"])
        assert case["op"] in MAY_BE_UNSUPPORTED
        pytest.skip(f"unsupported yet: {case['id']} ({reason})")
    assert not failures, f"{case['title']}: {failures}"


def test_there_are_85_cases():
    assert len(attention_cases.CASES) == 85


def test_a_wrong_candidate_fails():
    """The runner can fail: a candidate that forgets the scale breaks most cases."""

    def forgets_scale(op, **arguments):
        if op == "attention":
            arguments = {**arguments, "scale": 1.0 if arguments.get("scale") is None else 0.5}
        return candidate(op, **arguments)

    plain = [c for c in attention_cases.CASES if c["op"] == "attention" and c["kind"] == "strides"]
    with np.errstate(all="ignore"):
        failures = [c["id"] for c in plain if attention_cases.run_case(c, forgets_scale)]
    assert failures
