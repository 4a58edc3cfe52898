"""What a solution left behind: reading the listing, and when a state counts as that of the whole solution."""

from termrsi.reward.endstate import parsed, same

WHOLE = {"/app": "d 755 0:0 x", "/app/a": "f 644 0:0  1", "/app/when": "f 644 0:0  2"}
AGAIN = {"/app": "d 755 0:0 x", "/app/a": "f 644 0:0  1", "/app/when": "f 644 0:0  3"}


def test_a_listing_is_attributes_and_sums_by_path() -> None:
    listing = "d 755 0:0 \t/app\0f 644 0:0 \t/app/a b\0l 777 0:0 /etc\t/app/l\0ab12  /app/a b\0ff00  /app\0"
    assert parsed(listing) == {"/app": "d 755 0:0  ff00", "/app/a b": "f 644 0:0  ab12", "/app/l": "l 777 0:0 /etc"}


def test_what_two_runs_share_must_be_there_and_alike() -> None:
    assert same(AGAIN, WHOLE, AGAIN)
    assert not same(AGAIN | {"/app/a": "f 644 0:0  9"}, WHOLE, AGAIN)
    assert not same(AGAIN | {"/app/a": "f 600 0:0  1"}, WHOLE, AGAIN), "a mode counts"
    assert not same({key: WHOLE[key] for key in ("/app", "/app/when")}, WHOLE, AGAIN)
    assert not same(WHOLE | {"/app/new": "f 644 0:0  1"}, WHOLE, AGAIN)


def test_what_differs_between_two_runs_must_be_there_whatever_it_holds() -> None:
    assert same(WHOLE | {"/app/when": "f 644 0:0  7"}, WHOLE, AGAIN)
    assert not same(WHOLE | {"/app/when": "l 777 0:0 /x"}, WHOLE, AGAIN)
    assert not same({key: WHOLE[key] for key in ("/app", "/app/a")}, WHOLE, AGAIN)


def test_names_come_and_go_where_they_did_between_two_runs() -> None:
    first, second = WHOLE | {"/app/.git/objects/1": "f a"}, AGAIN | {"/app/.git/objects/2": "f b"}
    assert same(WHOLE | {"/app/.git/objects/3": "f c"}, first, second)
    assert not same(WHOLE | {"/app/3": "f c"}, first, second)
