"""Who is who among those that run as one."""

from bursar.core.objects.allocation import Peer
from bursar.core.objects.rank import PORT_FIRST, PORTS, joined, meeting_port, rank_of, ranked, size_of


def peer(name: str, index: int = -1, *nodes: str) -> Peer:
    return Peer(name, index, nodes or ("n1",))


def names(*peers: Peer) -> list[str]:
    return [one.name for one in peers]


def test_members_of_a_job_are_ranked_by_their_index_and_others_by_name() -> None:
    assert names(*ranked([peer("m-10", 10), peer("m-2", 2), peer("m-0-3", 0)])) == ["m-0-3", "m-2", "m-10"]
    assert names(*ranked([peer("w10"), peer("w9"), peer("chief"), peer("late", 0)])) == ["late", "chief", "w9", "w10"]


def test_a_retry_takes_the_place_of_the_one_it_follows_and_others_come_last() -> None:
    running = ranked([peer("m-0", 0), peer("m-1", 1), peer("m-2", 2)])
    assert names(*joined(running, [peer("m-1-1", 1, "n9")])) == ["m-0", "m-1-1", "m-2"]
    assert names(*joined(ranked([peer("b"), peer("a")]), [peer("aa"), peer("b", -1, "n9")])) == ["a", "b", "aa"]


def test_the_nodes_of_a_member_have_one_rank_each() -> None:
    peers = ranked([peer("a", 0, "n1", "n2"), peer("b", 1, "n3", "n4")])
    assert (rank_of(peers, "a"), rank_of(peers, "b"), rank_of(peers, "c")) == (0, 2, None)
    assert size_of(peers) == 4


def test_all_that_are_told_the_same_meet_at_the_same_port() -> None:
    assert meeting_port("lab/train-0") == meeting_port("lab/train-0")
    assert all(PORT_FIRST <= meeting_port(str(number)) < PORT_FIRST + PORTS for number in range(200))
