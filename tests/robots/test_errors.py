"""Messages of the errors a person can act on."""

import pytest

from robots.errors import UnknownNameError, UserError

KNOWN = ("left_knee_joint", "right_knee_joint", "torso_joint", "left_elbow_joint")


def test_unknown_name_lists_the_nearest_first():
    error = UnknownNameError("joint", "left_kne_joint", KNOWN)
    assert str(error).startswith("unknown joint 'left_kne_joint'; did you mean left_knee_joint,")
    assert "torso_joint" not in str(error)


def test_unknown_name_lists_everything_when_nothing_is_near():
    error = UnknownNameError("joint", "zzz", KNOWN)
    assert all(name in str(error) for name in KNOWN)


def test_unknown_name_carries_the_offending_data():
    error = UnknownNameError("joint", "x", iter(KNOWN))
    assert (error.kind, error.name, error.known) == ("joint", "x", sorted(KNOWN))


@pytest.mark.parametrize("kind", [UserError, KeyError])
def test_unknown_name_is_caught_as(kind):
    with pytest.raises(kind, match="unknown robot 'g1'"):
        raise UnknownNameError("robot", "g1", ["unitree_h1_2"])


def test_message_has_no_quotes_of_a_key_error_around_it():
    assert not str(UnknownNameError("robot", "g1", ["unitree_h1_2"])).startswith(("'", '"'))
