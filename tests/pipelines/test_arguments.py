"""Arguments of a pipeline's call by its signature, however the signature is written."""

import inspect
from typing import Any, List, Optional, Union  # noqa: UP035

import pytest

from flowgrpo.pipelines.arguments import argument_faults, refuse_other_size


def call(
    prompt: Any,
    height: Optional[int] = None,  # noqa: UP045
    width: "int | None" = None,
    scale: float = 1.0,
    texts: Union[str, List[str], None] = None,  # noqa: UP006, UP007
    listed: "str | list[str]" = "",
    flag: bool = False,
    anything: "torch.Tensor | None" = None,  # type: ignore[name-defined]  # noqa: F821
    sigmas: Any = None,
) -> None:
    """A pipeline's."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"height": 64, "width": 64, "scale": 2, "texts": ["a"], "listed": "b", "flag": True, "anything": "x"}, None),
        ({"height": None, "width": None}, None),
        ({"height": "64"}, "height is '64'; give a whole number"),
        ({"width": 64.0}, "width is 64.0; give a whole number"),
        ({"width": True}, "width is true; give a whole number"),
        ({"scale": "4"}, "scale is '4'; give a number"),
        ({"scale": float("inf")}, "scale is inf; give a finite number"),
        ({"anything": float("nan")}, "anything is nan; give a finite number"),
        ({"texts": 3}, "texts is 3; give a text or a list"),
        ({"listed": 3}, "listed is 3; give a text or a list"),
        ({"flag": 1}, "flag is 1; give true or false"),
        ({"hieght": 1}, "did you mean 'height'?"),
        ({"prompt": "x"}, "is set for each evaluation"),
        ({"sigmas": [1]}, "set sampler.sigmas"),
    ],
)
def test_values_are_judged_by_the_signature(given: dict[str, Any], said: str | None):
    found = list(argument_faults(inspect.signature(call).parameters, given, "", "the pipeline"))
    assert len(found) == (0 if said is None else 1), found
    assert said is None or said in found[0]


def test_a_call_that_takes_anything_refuses_no_name():
    def free(**anything: Any) -> None:
        """A pipeline's."""

    assert list(argument_faults(inspect.signature(free).parameters, {"x": 1}, "", "the pipeline")) == []


def test_a_picture_of_another_size_than_asked_for_is_refused():
    refuse_other_size({"height": 48, "width": None}, 48, 64)
    with pytest.raises(ValueError, match="height is 50, but the pipeline makes 48; write height: 48"):
        refuse_other_size({"height": 50}, 48, 48)
    # The pipeline makes 32 here, and with width 32 it would make 16.
    with pytest.raises(ValueError, match="width is 64, but the pipeline makes 32; leave width out, or give"):
        refuse_other_size({"height": 32, "width": 64}, 32, 32)
    refuse_other_size({"num_frames": 9}, 48, 64, 9)
    refuse_other_size({"num_frames": 9}, 48, 64)
    with pytest.raises(ValueError, match="num_frames is 10, but the pipeline makes 9; write num_frames: 9"):
        refuse_other_size({"num_frames": 10}, 48, 64, 9)
