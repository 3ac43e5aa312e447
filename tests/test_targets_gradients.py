"""Gradients by kernels for other processors: a file of its own, which runs beside the other."""

import pytest

from test_targets import OTHERS, check_on, on_x86

pytestmark = pytest.mark.heavy


@on_x86
@pytest.mark.parametrize("name", OTHERS)
def test_gradients(name):
    check_on(name, "gradients")
