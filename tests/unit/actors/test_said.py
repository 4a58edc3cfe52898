"""What one request of an engine has brought so far, piece by piece."""

from types import SimpleNamespace

from termrsi.actors.generator import _Said


def piece(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(
        token_ids=list(ids), logprobs=[{0: SimpleNamespace(logprob=9.0), i: SimpleNamespace(logprob=-i / 8)} for i in ids]
    )


def test_pieces_are_one_completion_with_the_versions_of_its_tokens() -> None:
    said = _Said()
    for version, ids in ((3, (1, 2)), (3, (3,)), (4, ()), (5, (4, 5))):
        said.add(piece(*ids), version)
    assert (said.ids, said.logprobs) == ([1, 2, 3, 4, 5], [-0.125, -0.25, -0.375, -0.5, -0.625])
    assert said.weights == [[3, 3], [5, 2]]
