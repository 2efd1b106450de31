from __future__ import annotations

from ringrun.elastic.cooldown import NEVER, Cooldown


def exclusions(cooldown: Cooldown, count: int, was_member: bool = True) -> list:
    """The lengths of so many exclusions, one after the other."""
    lengths, now_s = [], 100.0
    for _ in range(count):
        cooldown.fail(now_s, was_member)
        lengths.append(cooldown.until_s - now_s)
        now_s = max(now_s, cooldown.until_s)
    return lengths


def test_a_failure_within_the_exclusion_does_not_lengthen_it() -> None:
    cooldown = Cooldown(5.0)
    cooldown.fail(0.0, True)
    cooldown.fail(4.0, True)
    assert (cooldown.excludes(4.9), cooldown.excludes(5.0)) == (True, False)


def test_pauses_grow() -> None:
    assert exclusions(Cooldown(1.0), 3) == [1, 1, 2]
    assert exclusions(Cooldown(), 8) == [0, 1, 2, 4, 8, 16, 30, 30]


def test_success_and_the_user_end_the_growth_of_pauses() -> None:
    cooldown = Cooldown(quick_failures=3)
    assert exclusions(cooldown, 2, was_member=False) == [0, 1]
    cooldown.succeed()
    assert exclusions(cooldown, 3, was_member=False) == [0, 1, NEVER]
    cooldown.forgive()
    assert not cooldown.excludes(0.0)


def test_a_slot_whose_processes_never_join_is_given_up_and_others_are_not() -> None:
    assert exclusions(Cooldown(quick_failures=3), 3, was_member=False) == [0, 1, NEVER]
    assert exclusions(Cooldown(quick_failures=3), 4, was_member=True) == [0, 1, 2, 4]
